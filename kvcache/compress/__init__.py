"""From scores to tiers and full pages, at once or in the background. Imports `pages` and below."""
