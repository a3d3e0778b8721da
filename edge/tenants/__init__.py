"""Who may ask, how much, and what is counted for whom."""
