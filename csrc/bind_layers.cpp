// Decoder layers for Python. They hold addresses: whoever makes them keeps weights and caches alive.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "layers.hpp"

namespace plait {
namespace {

using Address = std::uintptr_t;
using Parts = std::vector<Matrix>;

using GivenNorm = std::pair<Address, float>;  // its weight and epsilon

Norm norm(const GivenNorm& given) { return {at<const float>(given.first), given.second}; }

Linear linear(Parts parts) {
  if (parts.empty()) throw std::invalid_argument("a linear layer needs at least one matrix");
  return {std::move(parts)};
}

void bind_parts(nb::module_& m) {
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def(
          "__init__",
          [](AttentionLayer* self, int index, int heads, bool gated, Address q_norm, Address k_norm, float scale,
             float eps) {
            new (self)
                AttentionLayer{index, heads, gated, at<const float>(q_norm), at<const float>(k_norm), scale, eps};
          },
          nb::arg("index"), nb::arg("heads"), nb::arg("gated"), nb::arg("q_norm"), nb::arg("k_norm"),
          nb::arg("scale"), nb::arg("eps"));

  nb::class_<DeltaLayer>(m, "DeltaLayer")
      .def(
          "__init__",
          [](DeltaLayer* self, int index, Address conv_weight, Address decay_rate, Address dt_bias, Address norm,
             float eps) {
            new (self) DeltaLayer{index,
                                  at<const float>(conv_weight),
                                  at<const float>(decay_rate),
                                  at<const float>(dt_bias),
                                  at<const float>(norm),
                                  eps};
          },
          nb::arg("index"), nb::arg("conv_weight"), nb::arg("decay_rate"), nb::arg("dt_bias"), nb::arg("norm"),
          nb::arg("eps"));

  nb::class_<Caches>(m, "Caches")
      .def(
          "__init__",
          [](Caches* self, std::vector<PagesView> pages, std::vector<StatesView> states) {
            new (self) Caches{std::move(pages), std::move(states)};
          },
          nb::arg("pages"), nb::arg("states"));
}

}  // namespace

void bind_layers(nb::module_& m) {
  bind_parts(m);

  nb::class_<Layers>(m, "Layers")
      .def(
          "__init__", [](Layers* self, std::int64_t hidden) { new (self) Layers{hidden, {}, std::nullopt}; },
          nb::arg("hidden"))
      // Without parts of gate_up and down: no mlp.
      .def(
          "append",
          [](Layers& self, const GivenNorm& input_norm, Parts in_proj,
             std::variant<AttentionLayer, DeltaLayer> mixer, Parts out_proj, const GivenNorm& post_norm,
             Parts gate_up, Parts down) {
            Layer layer{norm(input_norm),           linear(std::move(in_proj)), mixer,
                        linear(std::move(out_proj)), norm(post_norm),           std::nullopt};
            if (!gate_up.empty()) layer.mlp = Mlp{linear(std::move(gate_up)), linear(std::move(down))};
            self.layers.push_back(std::move(layer));
          },
          nb::arg("input_norm"), nb::arg("in_proj"), nb::arg("mixer"), nb::arg("out_proj"), nb::arg("post_norm"),
          nb::arg("gate_up"), nb::arg("down"))
      .def(
          "end", [](Layers& self, const GivenNorm& last) { self.last = norm(last); }, nb::arg("norm"))
      // Returns the seconds of GEMM, attention and recurrence. See run_layers.
      .def(
          "run",
          [](const Layers& self, const Caches& caches, const OwnedBatch& batch, Address x, Address sum, bool first,
             Address cos, Address sin, int rotary_half) {
            LayerSeconds spent;
            {
              const nb::gil_scoped_release others;
              spent = run_layers(self, caches, batch.view,
                                 {at<float>(x), at<float>(sum), first, at<const float>(cos), at<const float>(sin),
                                  rotary_half});
            }
            return nb::make_tuple(spent.gemm, spent.attention, spent.recurrence);
          });
}

}  // namespace plait
