// Of what cuda/mma.cuh wraps, the products of float64, on the CPU: a lane works out its own two sums.
#pragma once

// d[8, 8] += a[8, 4] * b[4, 8] of a warp: a lane has an element of row, or column, lane / 4.
inline void mma_f64(double& d0, double& d1, double a, double b) {
  const auto other = [](double x, int lane) {
    unsigned words[2];
    std::memcpy(words, &x, 8);
    for (unsigned& word : words) word = emulator::exchange(word, lane);
    std::memcpy(&x, words, 8);
    return x;
  };
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < 4; ++k) {
    const double row = other(a, lane / 4 * 4 + k);
    d0 = std::fma(row, other(b, lane % 4 * 2 * 4 + k), d0);
    d1 = std::fma(row, other(b, (lane % 4 * 2 + 1) * 4 + k), d1);
  }
}
