"""Access: who may ask a service of kvcdn for what. Grants, the tokens and links that carry them, and allowances by tenant.

No I/O and no clock of its own: files are read by the services' settings, and the time is a parameter.
"""
