"""kvcdn against what a user would pick instead: the same KV kept and read back in other ways, measured and damaged alike."""
