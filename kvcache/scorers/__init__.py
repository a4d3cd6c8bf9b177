"""Which tokens are kept, and at how many bits: scorer → budget → tiers, each on its own."""
