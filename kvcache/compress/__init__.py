"""From scores to tiers and full pages, at once or in the background. Imports: config, sizes, quantize, kernels, pages."""
