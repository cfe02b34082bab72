import { RefreshCw } from "lucide-react";
import { Component, type ReactNode } from "react";

/** Stands in for a view that failed, as one does whose files a newer server does not have any more. */
export class Boundary extends Component<{ children: ReactNode }, { failed: boolean }> {
  state = { failed: false };

  static getDerivedStateFromError(): { failed: boolean } {
    return { failed: true };
  }

  render(): ReactNode {
    if (!this.state.failed) return this.props.children;
    return (
      <main id="main" className="failed" tabIndex={-1}>
        <h1>This view has failed</h1>
        <p>It may belong to another version of the server. Your conversations are kept.</p>
        <button className="primary" onClick={() => location.reload()}>
          <RefreshCw aria-hidden /> Load the page again
        </button>
      </main>
    );
  }
}
