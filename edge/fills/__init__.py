"""From origins, tiers and peers to the disk: one fill an object, every byte checked."""
