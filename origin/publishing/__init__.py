"""From a document to its blocks and manifest: the one path by which KV caches are written."""
