// Linear layers over packed panels: how rows and panels are dealt out to tiles and threads.
//
// Threads share out panels, never k. Up to kMaxRows rows are one tile high, and panels are read once, as
// stored. Memory is the limit, so a tile's panels lie far apart, each the next of a long stream from tile to
// tile. With more rows a thread takes a few panels at a time through all blocks of rows, so that those panels
// stay in its second cache; 16-bit weights are widened to float32 once for all rows.
#include <algorithm>

#include "../linear/embedding.hpp"
#include "../linear/tiles.hpp"
#include "../linear_kernels.hpp"
#include "../pool.hpp"

namespace plait::PLAIT_ISA {
namespace {

enum Scratch { kUnits, kScales, kWidened };

constexpr std::int64_t kPanelStep = 4;  // panels that go through all rows together
// Inputs that go through all rows together: 4 panels x 1,024 x 16 floats are a quarter of a second cache of
// 1 MiB. Shorter stretches cost more than they save: sums leave the registers and come back at their ends.
constexpr std::int64_t kStretch = 1024;

// Rows of one weight matrix, with their activations packed.
struct Group {
  const std::byte* panels;
  std::int64_t first;  // row of y, and of the packed activations
  std::int64_t rows;
};

struct Job {
  Matrix weight;               // panels: of the first expert
  std::int64_t units, scales;  // of one row
  const std::int32_t* packed;
  const float* packed_scales;
  const std::int32_t* offsets;
  float* y;
  std::int64_t y_stride;
  std::int64_t panel_stride;
};

// Rows of a group are cut into blocks of nearly equal height.
constexpr std::int64_t blocks_of(std::int64_t rows) { return (rows + kMaxRows - 1) / kMaxRows; }
constexpr std::int64_t block_start(std::int64_t rows, std::int64_t block) {
  return rows * block / blocks_of(rows);
}

TileInput input_of(const Job& job, std::int64_t row) {
  return {job.packed + row * job.units, job.packed_scales + row * job.scales, job.offsets + row * job.scales};
}

// Calls run(output) for the R x P tile at `row` and `panel`, its panels `apart` from one another.
template <int R, int P, class Run>
[[gnu::always_inline]] inline void with_output(const Job& job, std::int64_t row, std::int64_t panel,
                                               std::int64_t apart, bool last, Run run) {
  const float* bias = last && job.weight.bias ? job.weight.bias + 16 * panel : nullptr;
  const TileOutput out{job.y + row * job.y_stride + 16 * panel, job.y_stride, bias, 16 * apart};
  const std::int64_t columns = job.weight.outputs - 16 * panel;
  if (columns >= 16 * (apart * (P - 1) + 1)) return run(out);
  Ragged<R, P> ragged(out, columns);
  run(ragged.wide());
  ragged.copy_back();
}

template <WeightFormat format>
using Stored = std::conditional_t<format == WeightFormat::f32, float,
                                  std::conditional_t<format == WeightFormat::f16, f16, bf16>>;

// The tile of P panels from `panel` on, each `apart` panels behind the one before. A panel that is not whole
// must be the last of neighbours.
template <WeightFormat format, int R, int P>
void tile(const Job& job, const Group& group, std::int64_t row, std::int64_t panel, std::int64_t apart = 1) {
  const Panels<P> panels(group.panels + panel * job.panel_stride, job.panel_stride, apart * job.panel_stride);
  const TileInput in = input_of(job, group.first + row);
  with_output<R, P>(job, group.first + row, panel, apart, true, [&](TileOutput out) {
    if constexpr (units_of(format) == Units::floats) {
      float_tile<Stored<format>, R, P>(panels, job.weight.inputs, in, out, false);
    } else if constexpr (format == WeightFormat::int8) {
      int8_tile<R, P>(panels, job.weight.inputs, in, out);
    } else if constexpr (format == WeightFormat::q8_0) {
      q8_0_tile<R, P>(panels, job.weight.inputs, in, out);
    } else {
      nibble_tile<format, R, P>(panels, job.weight.inputs, in, out);
    }
  });
}

// R rows from `row` on, panels `begin` to `end`.
template <WeightFormat format, int R>
void tiles(const Job& job, const Group& group, std::int64_t row, std::int64_t begin, std::int64_t end) {
  constexpr int P = panels_at_once(R);
  std::int64_t panel = begin;
  if constexpr (P > 1) {
    const std::int64_t whole = std::min(end, job.weight.outputs / 16) - begin, stream = whole / P;
    for (; panel < begin + stream; ++panel) tile<format, R, P>(job, group, row, panel, stream);
    if (stream > 0) panel = begin + stream * P;
  }
  for (; panel + P <= end; panel += P) tile<format, R, P>(job, group, row, panel);
  if constexpr (P > 2) {
    for (; panel + 2 <= end; panel += 2) tile<format, R, 2>(job, group, row, panel);
  }
  if constexpr (P > 1) {
    for (; panel < end; ++panel) tile<format, R, 1>(job, group, row, panel);
  }
}

// Float32 weights of a few panels over `length` inputs from `from` on; `start` is where the first has `from`.
struct Stretch {
  const std::byte* start;
  std::int64_t stride;  // between panels, bytes
  std::int64_t from, length;
};

// R rows from `row` on, panels `begin` to `end`, the inputs of `stretch`.
template <int R>
void float_tiles(const Job& job, const Group& group, std::int64_t row, std::int64_t begin, std::int64_t end,
                 const Stretch& stretch) {
  constexpr int P = panels_at_once(R) > 2 ? 2 : panels_at_once(R);
  TileInput in = input_of(job, group.first + row);
  in.units += stretch.from * R;
  const bool last = stretch.from + stretch.length == job.weight.inputs;
  for (std::int64_t panel = begin; panel < end;) {
    const std::byte* at = stretch.start + (panel - begin) * stretch.stride;
    const auto run = [&]<int count>(std::integral_constant<int, count>) {
      with_output<R, count>(job, group.first + row, panel, 1, last, [&](TileOutput out) {
        const Panels<count> panels(at, stretch.stride, stretch.stride);
        float_tile<float, R, count>(panels, stretch.length, in, out, stretch.from > 0);
      });
      panel += count;
    };
    if (panel + P <= end) {
      run(std::integral_constant<int, P>{});
    } else {
      run(std::integral_constant<int, 1>{});
    }
  }
}

using TilesFunction = void (*)(const Job&, const Group&, std::int64_t, std::int64_t, std::int64_t);
using FloatFunction = void (*)(const Job&, const Group&, std::int64_t, std::int64_t, std::int64_t,
                               const Stretch&);

// Entry R - 1 is for R rows.
template <WeightFormat format, class Sequence>
struct TilesTable;
template <WeightFormat format, int... R>
struct TilesTable<format, std::integer_sequence<int, R...>> {
  static constexpr TilesFunction functions[] = {&tiles<format, R + 1>...};
};
template <class Sequence>
struct FloatTable;
template <int... R>
struct FloatTable<std::integer_sequence<int, R...>> {
  static constexpr FloatFunction functions[] = {&float_tiles<R + 1>...};
};

using Heights = std::make_integer_sequence<int, kMaxRows>;

template <class Visit>
void each_block(const Group& group, Visit visit) {
  for (std::int64_t block = 0; block < blocks_of(group.rows); ++block) {
    const std::int64_t row = block_start(group.rows, block);
    visit(row, block_start(group.rows, block + 1) - row);
  }
}

// Inputs `from` to `from + length` of panels `begin` to `end`: as stored, or widened to `wide`
// [panels][kStretch][16].
template <WeightFormat format>
Stretch stretch_of(const Job& job, const Group& group, std::int64_t begin, std::int64_t end,
                   std::int64_t from, std::int64_t length, float* wide) {
  using T = Stored<format>;
  const std::byte* first = group.panels + begin * job.panel_stride + 16 * sizeof(T) * from;
  if constexpr (format == WeightFormat::f32) return {first, job.panel_stride, from, length};
  for (std::int64_t panel = 0; panel < end - begin; ++panel) {
    const T* weights = reinterpret_cast<const T*>(first + panel * job.panel_stride);
    float* to = wide + panel * kStretch * 16;
    for (std::int64_t k = 0; k < length; ++k) store(to + 16 * k, load(weights + 16 * k));
  }
  return {reinterpret_cast<const std::byte*>(wide), kStretch * 16 * sizeof(float), from, length};
}

template <WeightFormat format>
void float_rows(const Job& job, const Group& group, std::int64_t begin, std::int64_t end, float* wide) {
  const std::int64_t inputs = job.weight.inputs;
  for (std::int64_t from = 0; from < inputs; from += kStretch) {
    const std::int64_t length = std::min(inputs - from, kStretch);
    const Stretch stretch = stretch_of<format>(job, group, begin, end, from, length, wide);
    each_block(group, [&](std::int64_t row, std::int64_t height) {
      FloatTable<Heights>::functions[height - 1](job, group, row, begin, end, stretch);
    });
  }
}

// Panels `begin` to `end` of one group.
template <WeightFormat format>
void run_group(const Job& job, const Group& group, std::int64_t begin, std::int64_t end) {
  const auto& functions = TilesTable<format, Heights>::functions;
  if (group.rows <= kMaxRows) return functions[group.rows - 1](job, group, 0, begin, end);
  float* wide = nullptr;
  if constexpr (units_of(format) == Units::floats && format != WeightFormat::f32) {
    wide = scratch_of<float>(kWidened, kPanelStep * kStretch * 16);
  }
  for (std::int64_t panel = begin; panel < end; panel += kPanelStep) {
    const std::int64_t next = panel + kPanelStep < end ? panel + kPanelStep : end;
    if constexpr (units_of(format) == Units::floats) {
      float_rows<format>(job, group, panel, next, wide);
    } else {
      each_block(group, [&](std::int64_t row, std::int64_t height) {
        functions[height - 1](job, group, row, panel, next);
      });
    }
  }
}

// Where row `row` of a group goes.
RowTarget target_of(const Job& job, const Group& group, std::int64_t row) {
  const std::int64_t block = ((row + 1) * blocks_of(group.rows) - 1) / group.rows;
  const std::int64_t start = block_start(group.rows, block);
  const std::int64_t step = block_start(group.rows, block + 1) - start;
  const TileInput in = input_of(job, group.first + start);
  const std::int64_t column = row - start;
  return {const_cast<std::int32_t*>(in.units) + column, const_cast<float*>(in.scales) + column,
          const_cast<std::int32_t*>(in.offsets) + column, static_cast<int>(step)};
}

// Nanoseconds of work that a range shall have at least: several times what it takes to wake a thread.
constexpr std::int64_t kWorthAThread = 12'000;

// About how long `rows` rows take through one panel: reading it, or multiplying.
std::int64_t panel_nanoseconds(const Job& job, std::int64_t rows) {
  return job.panel_stride / 20 + rows * job.weight.inputs * 16 / 64 + 1;
}

template <WeightFormat format>
void run(const ExpertsCall& call, std::int64_t y_stride) {
  const Matrix& weight = call.first;
  const std::int64_t rows = call.starts[call.experts], panels = panels_of(weight.outputs);
  if (rows == 0 || panels == 0) return;
  Job job{};
  job.weight = weight;
  job.units = unit_count(format, weight.inputs);
  job.scales = scale_count(format, weight.inputs);
  job.y = call.y;
  job.y_stride = y_stride;
  job.panel_stride = panel_bytes(format, weight.inputs);
  const auto group_of = [&](std::int64_t expert) {
    const std::int64_t first = call.starts[expert];
    return Group{weight.panels + expert * panels * job.panel_stride, first, call.starts[expert + 1] - first};
  };

  if (units_of(format) == Units::floats && rows == 1) {
    const std::int64_t source = call.sources ? call.sources[0] : 0;
    job.packed = reinterpret_cast<const std::int32_t*>(call.x + source * weight.inputs);
  } else {
    job.packed = scratch_of<std::int32_t>(kUnits, rows * job.units);
    float* scales = scratch_of<float>(kScales, 2 * rows * job.scales);
    job.packed_scales = scales;
    job.offsets = reinterpret_cast<const std::int32_t*>(scales + rows * job.scales);
    const std::int64_t row_grain = kWorthAThread / (weight.inputs + 1) + 1;
    parallel_for(rows, row_grain, [&](std::int64_t begin, std::int64_t end, int) {
      std::int64_t expert = 0;
      for (std::int64_t row = begin; row < end; ++row) {
        while (call.starts[expert + 1] <= row) ++expert;
        const std::int64_t source = call.sources ? call.sources[row] : row;
        pack_row<format>(call.x + source * weight.inputs, weight.inputs,
                         target_of(job, group_of(expert), row - call.starts[expert]));
      }
    });
  }

  // Items are the panels of the experts that have rows, one expert after another, by as many as a tile takes:
  // a tile of fewer leaves part of the registers unused.
  std::int64_t active = 0;
  for (std::int64_t e = 0; e < call.experts; ++e) active += call.starts[e + 1] > call.starts[e];
  const std::int64_t height = std::min<std::int64_t>((rows + active - 1) / active, kMaxRows);
  const std::int64_t wide = panels_at_once(static_cast<int>(height));
  const std::int64_t items = (panels + wide - 1) / wide;
  const std::int64_t grain = kWorthAThread / (wide * panel_nanoseconds(job, rows / active)) + 1;
  parallel_for(active * items, grain, [&](std::int64_t begin, std::int64_t end, int) {
    std::int64_t first = 0;  // the expert's first item
    for (std::int64_t e = 0; e < call.experts && first < end; ++e) {
      const Group group = group_of(e);
      if (group.rows == 0) continue;
      const std::int64_t from = std::max(begin - first, std::int64_t{0});
      const std::int64_t to = std::min(end - first, items);
      if (from < to) run_group<format>(job, group, from * wide, std::min(to * wide, panels));
      first += items;
    }
  });
}

void run_any(const ExpertsCall& call, std::int64_t y_stride) {
  switch (call.first.format) {
    case WeightFormat::f32: return run<WeightFormat::f32>(call, y_stride);
    case WeightFormat::bf16: return run<WeightFormat::bf16>(call, y_stride);
    case WeightFormat::f16: return run<WeightFormat::f16>(call, y_stride);
    case WeightFormat::int8: return run<WeightFormat::int8>(call, y_stride);
    case WeightFormat::q8_0: return run<WeightFormat::q8_0>(call, y_stride);
    case WeightFormat::q4_0: return run<WeightFormat::q4_0>(call, y_stride);
    case WeightFormat::q4_1: return run<WeightFormat::q4_1>(call, y_stride);
  }
}

void linear(const LinearCall& call) {
  const std::int64_t starts[2] = {0, call.rows};
  run_any({call.weight, 1, starts, nullptr, call.x, call.y}, call.y_stride);
}

void experts(const ExpertsCall& call) { run_any(call, call.first.outputs); }

}  // namespace

extern const LinearKernels linear_kernels;
constinit const LinearKernels linear_kernels{&linear, &experts, &embedding};

}  // namespace plait::PLAIT_ISA
