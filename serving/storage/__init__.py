"""Storage tiers. Each is a Store; a parameter server is an ordered list of them."""
