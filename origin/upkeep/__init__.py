"""The life of what is published: listing, checking, copying, removing, revoking, and the journal of it all. No torch."""
