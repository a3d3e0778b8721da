"""From a source's bytes to the layers of a cache: matching, reading, verifying, decoding, and what this host keeps."""
