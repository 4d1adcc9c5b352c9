// Attention, recurrence, norms and mixture of experts for Python. Sizes and strides as in mixer_kernels.hpp.
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.hpp"
#include "kernels.hpp"

namespace plait {
namespace {

using Address = std::uintptr_t;

void bind_views(nb::module_& m) {
  nb::enum_<CacheFormat>(m, "CacheFormat")
      .value("f32", CacheFormat::f32)
      .value("bf16", CacheFormat::bf16)
      .value("f16", CacheFormat::f16)
      .value("e4m3", CacheFormat::e4m3)
      .value("int8", CacheFormat::int8);

  nb::class_<OwnedBatch>(m, "BatchView")
      .def(
          "__init__",
          [](OwnedBatch* self, Address query_start, Address context, Address slots, Address page_table,
             std::int64_t chunks, std::int64_t table_width, std::vector<std::int64_t> exports) {
            new (self) OwnedBatch{{}, std::move(exports)};
            self->view = {at<const std::int32_t>(query_start),
                          at<const std::int32_t>(context),
                          at<const std::int32_t>(slots),
                          at<const std::int32_t>(page_table),
                          self->exports.data(),
                          chunks,
                          table_width,
                          static_cast<std::int64_t>(self->exports.size() / 3)};
          },
          nb::arg("query_start"), nb::arg("context"), nb::arg("slots"), nb::arg("page_table"), nb::arg("chunks"),
          nb::arg("table_width"), nb::arg("exports"));

  nb::class_<PagesView>(m, "PagesView")
      .def(
          "__init__",
          [](PagesView* self, Address k, Address v, Address k_scale, Address v_scale, std::int64_t page_bytes,
             std::int64_t head_bytes, int page_size, int kv_heads, int head_dim, CacheFormat format) {
            new (self) PagesView{at<std::byte>(k), at<std::byte>(v), at<std::byte>(k_scale), at<std::byte>(v_scale),
                                 page_bytes,       head_bytes,       page_size,              kv_heads,
                                 head_dim,         format};
          },
          nb::arg("k"), nb::arg("v"), nb::arg("k_scale"), nb::arg("v_scale"), nb::arg("page_bytes"),
          nb::arg("head_bytes"), nb::arg("page_size"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("format"));

  nb::class_<StatesView>(m, "StatesView")
      .def(
          "__init__",
          [](StatesView* self, Address conv, Address temporal, std::int64_t unit_bytes, std::int64_t group_bytes,
             int groups, int value_heads, int key_dim, int value_dim, int width, CacheFormat format) {
            new (self) StatesView{at<float>(conv), at<std::byte>(temporal), unit_bytes, group_bytes, groups,
                                  value_heads,     key_dim,                 value_dim,  width,       format};
          },
          nb::arg("conv"), nb::arg("temporal"), nb::arg("unit_bytes"), nb::arg("group_bytes"), nb::arg("groups"),
          nb::arg("value_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("width"), nb::arg("format"));
}

void bind_token_mixers(nb::module_& m) {
  m.def(
      "attention",
      [](const OwnedBatch& batch, const PagesView& pages, Address q, Address k, Address v, Address gate,
         std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, std::int64_t gate_stride,
         Address q_norm, Address k_norm, Address cos, Address sin, Address out, int heads, int rotary_half,
         float scale, float eps) {
        const AttentionCall call{at<const float>(q),      at<const float>(k),      at<const float>(v),
                                 at<const float>(gate),   q_stride,                k_stride,
                                 v_stride,                gate_stride,             at<const float>(q_norm),
                                 at<const float>(k_norm), at<const float>(cos),    at<const float>(sin),
                                 at<float>(out),          heads,                   rotary_half,
                                 scale,                   eps};
        kernels().mixers->attention(batch.view, pages, call);
      },
      no_gil());
  m.def(
      "delta",
      [](const OwnedBatch& batch, const StatesView& states, Address x, Address b, Address a, Address z,
         std::int64_t x_stride, std::int64_t b_stride, std::int64_t a_stride, std::int64_t z_stride,
         Address conv_weight, Address decay_rate, Address dt_bias, Address norm, float eps, Address out) {
        const DeltaCall call{at<const float>(x),
                             at<const float>(b),
                             at<const float>(a),
                             at<const float>(z),
                             x_stride,
                             b_stride,
                             a_stride,
                             z_stride,
                             at<const float>(conv_weight),
                             at<const float>(decay_rate),
                             at<const float>(dt_bias),
                             at<const float>(norm),
                             eps,
                             at<float>(out)};
        kernels().mixers->delta(batch.view, states, call);
      },
      no_gil());
  m.def(
      "conv",
      [](const OwnedBatch& batch, const StatesView& states, Address x, std::int64_t x_stride, Address weight,
         Address out) {
        kernels().mixers->conv(batch.view, states, at<const float>(x), x_stride, at<const float>(weight),
                               at<float>(out));
      },
      no_gil());
}

void bind_rows(nb::module_& m) {
  m.def(
      "rms_norm",
      [](Address x, std::int64_t x_stride, Address residual, Address sum, Address gate, std::int64_t gate_stride,
         Address weight, float eps, Address out, std::int64_t rows, std::int64_t size) {
        kernels().mixers->rms_norm(at<const float>(x), x_stride, at<const float>(residual), at<float>(sum),
                                   at<const float>(gate), gate_stride, at<const float>(weight), eps,
                                   at<float>(out), rows, size);
      },
      no_gil());
  m.def(
      "rotary",
      [](Address x, Address cos, Address sin, Address out, std::int64_t tokens, int heads, int dim, int half) {
        kernels().mixers->rotary(at<const float>(x), at<const float>(cos), at<const float>(sin), at<float>(out),
                                 tokens, heads, dim, half);
      },
      no_gil());
  m.def(
      "silu_and_mul",
      [](Address x, Address out, std::int64_t rows, std::int64_t size) {
        kernels().mixers->silu_and_mul(at<const float>(x), at<float>(out), rows, size);
      },
      no_gil());
  m.def(
      "route",
      [](Address logits, std::int64_t rows, int experts, int top_k, bool renormalise, Address weights, Address places,
         Address starts, Address sources) {
        kernels().mixers->route({at<const float>(logits), rows, experts, top_k, renormalise, at<float>(weights),
                                 at<std::int64_t>(places), at<std::int64_t>(starts), at<std::int64_t>(sources)});
      },
      no_gil());
  m.def(
      "combine",
      [](Address y, Address places, Address weights, Address shared, Address gate, Address out, std::int64_t rows,
         int top_k, std::int64_t size) {
        kernels().mixers->combine(at<const float>(y), at<const std::int64_t>(places), at<const float>(weights),
                                  at<const float>(shared), at<const float>(gate), at<float>(out), rows, top_k, size);
      },
      no_gil());
}

}  // namespace

void bind_mixers(nb::module_& m) {
  m.attr("largest_head") = kLargestHead;
  m.attr("most_taps") = kMostTaps;
  bind_views(m);
  bind_token_mixers(m);
  bind_rows(m);
}

}  // namespace plait
