"""From a request to its answer: routes, the fast path, administration, and the log line of each."""
