"""Where a client's blocks come from: edges, an origin over HTTP, a folder or bucket, and one in place of another."""
