"""Several engines behind one address: where a request goes, and the gateway that sends it there."""
