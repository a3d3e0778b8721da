"""What happens to a cache besides reading: warming, pins, purges, recalls, the scrub, and its status."""
