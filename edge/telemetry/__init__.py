"""What an edge tells of itself: metrics, logs, traces, and how they went in time."""
