#include "bindings.hpp"
#include "kernels.hpp"

namespace plait {

void bind_sampling(nb::module_& m) {
  using Address = std::uintptr_t;
  m.def(
      "sum_exp",
      [](Address logits, std::int64_t rows, std::int64_t count, Address peaks, Address temperatures, Address sums) {
        kernels().sampling->sum_exp(at<const float>(logits), rows, count, at<const double>(peaks),
                                    at<const double>(temperatures), at<double>(sums));
      },
      no_gil());
  m.def(
      "draw",
      [](Address logits, std::int64_t count, double peak, double temperature, double floor, std::uint64_t seed,
         std::uint64_t position) {
        return kernels().sampling->draw({at<const float>(logits), count, peak, temperature, floor, seed, position});
      },
      no_gil());
  m.def(
      "largest",
      [](Address logits, std::int64_t rows, std::int64_t count, Address peaks, Address ids) {
        kernels().sampling->largest(at<const float>(logits), rows, count, at<float>(peaks), at<std::int64_t>(ids));
      },
      no_gil());
}

}  // namespace plait
