"""What a layer computes besides attention, in C++ and as torch references. Imports: kvcache."""
