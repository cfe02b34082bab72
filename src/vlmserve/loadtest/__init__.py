"""Load tests of any server with an OpenAI-compatible API: workloads, the client, figures and reports."""
