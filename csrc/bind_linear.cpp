#include "bindings.hpp"
#include "kernels.hpp"
#include "pack.hpp"

namespace plait {
namespace {

using Address = std::uintptr_t;

WeightFormat format_of(int number) {
  if (number < 0 || number >= kFormats) throw std::invalid_argument("no such weight format");
  return static_cast<WeightFormat>(number);
}

Matrix matrix(int format, std::int64_t outputs, std::int64_t inputs, Address panels, Address bias) {
  return {format_of(format), outputs, inputs, at<const std::byte>(panels), at<const float>(bias)};
}

}  // namespace

void bind_linear(nb::module_& m) {
  const char* names[kFormats] = {"f32", "bf16", "f16", "int8", "q8_0", "q4_0", "q4_1"};
  nb::dict formats;
  for (int i = 0; i < kFormats; ++i) formats[names[i]] = i;
  m.attr("FORMATS") = formats;

  // Addresses, not memory: whoever makes a Matrix keeps its panels and bias alive.
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, int format, std::int64_t outputs, std::int64_t inputs, Address panels,
              Address bias) { new (self) Matrix(matrix(format, outputs, inputs, panels, bias)); });

  m.def("matrix_bytes", [](int format, std::int64_t outputs, std::int64_t inputs) {
    return panels_of(outputs) * panel_bytes(format_of(format), inputs);
  });
  m.def(
      "pack",
      [](int format, std::int64_t outputs, std::int64_t inputs, int type, Address weights, Address panels) {
        pack(format_of(format), outputs, inputs, format_of(type), at<const void>(weights),
             at<std::byte>(panels));
      },
      no_gil());
  m.def(
      "repack",
      [](int format, std::int64_t outputs, std::int64_t inputs, Address blocks, Address panels) {
        repack(format_of(format), outputs, inputs, at<const std::uint8_t>(blocks), at<std::byte>(panels));
      },
      no_gil());
  m.def(
      "linear",
      [](const Matrix& weight, Address x, std::int64_t rows, Address y, std::int64_t y_stride) {
        kernels().linear->linear({weight, at<const float>(x), rows, at<float>(y), y_stride});
      },
      no_gil());
  m.def(
      "experts",
      [](const Matrix& first, std::int64_t experts, Address starts, Address sources, Address x, Address y) {
        kernels().linear->experts({first, experts, at<const std::int64_t>(starts),
                                   at<const std::int64_t>(sources), at<const float>(x), at<float>(y)});
      },
      no_gil());
  m.def(
      "embedding",
      [](const Matrix& table, Address ids, std::int64_t count, Address y) {
        kernels().linear->embedding(table, at<const std::int64_t>(ids), count, at<float>(y));
      },
      no_gil());
}

}  // namespace plait
