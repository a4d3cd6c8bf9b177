"""What a layer computes besides matrix products and attention, as C++ kernels with torch references."""
