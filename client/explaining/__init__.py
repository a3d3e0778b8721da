"""Why a prompt is not, or not further, what is published, and what in prompts will keep it so."""
