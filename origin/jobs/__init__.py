"""What the prefill service is asked for, kept in one file that survives whatever happens."""
