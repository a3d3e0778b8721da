"""The publisher's side: where documents come from, and the one path by which KV caches are written."""
