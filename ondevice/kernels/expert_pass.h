// The chosen experts of one forward pass through a layer, multiplied as they arrive.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "runner.h"

namespace ondevice {

// What all rows of a pass chose: ids and weights (tokens, chosen), ids ascending in each row.
struct ChosenExperts {
  const int32_t* ids;
  const float* weights;
  int64_t tokens, chosen;
};

// Multiplies x (tokens, hidden), rows x_stride floats apart, by the expert of this number and record -> out.
using MultiplyExpert = std::function<void(int32_t expert, const uint8_t* record, const float* x,
                                          int64_t x_stride, int64_t tokens, float* out)>;

// Adds each expert's output, times its weight, to the rows that chose it: in the order of the experts'
// numbers, whatever the order in which they are added, so that a row's bits don't depend on it.
//
// Its outputs are in the runner's scratch memory until `finish`. Nothing else may use that meanwhile.
class ExpertPass {
 public:
  // in_order: experts are added in ascending order, so that no output is held. x (tokens, hidden) and total,
  // the same, are the caller's until `finish`.
  ExpertPass(Runner& runner, MultiplyExpert multiply, const float* x, int64_t x_stride, int64_t hidden,
             const ChosenExperts& chosen, bool in_order, float* total);

  // Multiplies the expert whose record is at `record`. Throws std::invalid_argument for one that no row
  // chose, that was added before, or that is out of order.
  void add(int32_t expert, const uint8_t* record);
  // Adds what is held to the total. Throws std::invalid_argument unless all experts were added.
  void finish();

 private:
  void add_rows(const float* rows, int64_t place);

  Runner& runner_;
  const MultiplyExpert multiply_;
  const float* x_;
  const int64_t x_stride_, hidden_, tokens_;
  const bool in_order_;
  float* total_;
  std::vector<int32_t> experts_;  // all that are chosen, ascending
  std::vector<int64_t> first_;    // place of each one's first row in `rows_`, and where the last one's end
  std::vector<int32_t> rows_;     // the rows of the first expert, ascending, then those of the next
  std::vector<float> shares_;     // what each counts
  std::vector<bool> done_;
};

}  // namespace ondevice
