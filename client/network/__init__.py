"""One server and several: connections, requests, edges by health and nearness, what is tried again and for how long."""
