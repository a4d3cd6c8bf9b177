"""From scores to tiers and full pages. Imports: config, sizes, quantize, kernels, pages."""
