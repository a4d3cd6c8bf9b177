"""One score for each token, by which tokens are evicted; one module a method. Imports: nothing."""
