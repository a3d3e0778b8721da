"""Documents that change: looked at now and then, published again, the old version taken back."""
