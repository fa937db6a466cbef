// Rates of products by format and target, one thread: GMAC/s, medians of rounds in which targets take turns.
//
//   product_rates [TOKENS [ROWS [ROUNDS]]]
// Matrices have 1,536 columns, as the 1.5B's; with few rows they stay in a cache, with many they come from
// DRAM.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/runner.h"
#include "made_up_inputs.h"

int main(int count, char** arguments) {
  using ondevice::ScaleKind;
  const auto number = [&](int at, int64_t otherwise) {
    return count > at ? std::strtoll(arguments[at], nullptr, 10) : otherwise;
  };
  const int64_t tokens = number(1, 256), rows = number(2, 1024) / ondevice::kTile * ondevice::kTile,
                cols = 1536;
  const size_t rounds = static_cast<size_t>(number(3, 9));
  if (tokens < 1 || rows < 1 || rounds < 1) {
    std::fprintf(stderr, "product_rates takes at least 1 token, 16 rows and 1 round\n");
    return 2;
  }
  const std::vector<std::pair<std::string, ondevice::RowFormat>> formats = {
      {"Q2_K", {2, 16, ScaleKind::kTwoLevel}},  {"Q4_K", {4, 32, ScaleKind::kTwoLevel}},
      {"Q5_K", {5, 32, ScaleKind::kTwoLevel}},  {"Q6_K", {6, 16, ScaleKind::kTwoLevelSymmetric}},
      {"Q4_0", {4, 32, ScaleKind::kSymmetric}}, {"Q4_1", {4, 32}},
      {"Q5_0", {5, 32, ScaleKind::kSymmetric}}, {"Q8_0", {8, 32, ScaleKind::kSymmetric}},
      {"IQ4_NL", {4, 32, ScaleKind::kTable}},   {"4 bits by 64", {4}}};
  for (const auto& [name, format] : formats) {
    const Floats x = Random(1).values(tokens * cols);
    Floats y(static_cast<size_t>(tokens * rows));
    const Bytes tiles(static_cast<size_t>(rows * format.row_bytes(groups_of(cols))), 0x20);
    std::vector<std::pair<std::string, std::vector<double>>> rates;
    for (const std::string& target : ondevice::available_targets())
      if (target != "scalar") rates.push_back({target, {}});
    for (size_t round = 0; round < rounds; ++round)
      for (auto& [target, measured] : rates) {
        Runner runner(1, target);
        const auto inputs = runner.prepare(x.data(), cols, tokens, cols, format);
        const auto start = std::chrono::steady_clock::now();
        runner.kernels().linear_quantized(format, tiles.data(), inputs.quantized, tokens, nullptr, nullptr,
                                          y.data(), rows, rows, 0, rows / ondevice::kTile);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        measured.push_back(static_cast<double>(tokens * rows * cols) / seconds.count() / 1e9);
      }
    std::printf("%-12s", name.c_str());
    for (auto& [target, measured] : rates) {
      std::nth_element(measured.begin(), measured.begin() + static_cast<int64_t>(rounds / 2), measured.end());
      std::printf("  %s %.1f", target.c_str(), measured[rounds / 2]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}
