// The sum of a part of a bag's rows, by one thread: rows of the cache, in the table's form, and other rows.
#pragma once

#include "bags.cuh"
#include "columns.cuh"

constexpr u32 kNormLanes = 8;
constexpr u32 kLoadedUnits = 4 * kBlockThreads;  // of rows in shared memory: four loads under way in each thread

// The state of a round's keys. A row is a row number, kNoRow, or -2 - n: the fetched row of missing key n.
struct Round {
  u32 begin, end;  // keys of the item
  i64 keys[kRoundKeys];
  i64 rows[kRoundKeys];
  float weights[kRoundKeys];
  float factors[kRoundKeys];  // that scale the rows, if the table has a max_norm
};

// Rows that the host fetched.
struct Staged {
  const u8* rows;
  const u32* at;

  // Null if there is no fetched row.
  __device__ __forceinline__ const float* row(i64 row) const {
    if (row == kNoRow) return nullptr;
    return reinterpret_cast<const float*>(rows + rows::kUnitBytes * static_cast<i64>(__ldg(at + (-2 - row))));
  }
};

__device__ __forceinline__ i64 staged_row(u32 number) { return -2 - static_cast<i64>(number); }

// The columns that a thread sums at a time: a unit of 16 bytes, or half a unit if a unit has 16 columns, because a
// whole one would need more registers than a thread has.
template <class Row>
struct Part {
  static constexpr u32 columns = Row::unit_columns > 8 ? 8 : Row::unit_columns;
  static constexpr u32 per_unit = Row::unit_columns / columns;
  static constexpr u32 count = Row::units * per_unit;

  static __device__ __forceinline__ int first_column(u32 part) {
    return Row::first_column(part / per_unit) + static_cast<int>(part % per_unit * columns);
  }
  static __device__ __forceinline__ bool is_real(u32 part, u32 c) {
    const int column = first_column(part) + static_cast<int>(c);
    return column >= 0 && column < static_cast<int>(Row::dim);
  }
  static __device__ __forceinline__ uint4 load(const u8* row, u32 part) {
    return half(Row::load_unit(row, part / per_unit), part);
  }
  // The unit of a part, with the part's columns in front.
  static __device__ __forceinline__ uint4 half(uint4 unit, u32 part) {
    if (part % per_unit) {
      unit.x = unit.z;
      unit.y = unit.w;
    }
    return unit;
  }
  static __device__ __forceinline__ void decode(const uint4& unit, rows::Parameters parameters, float (&out)[columns]) {
    float all[Row::unit_columns];
    Row::decode(unit, parameters, all);
#pragma unroll
    for (u32 c = 0; c < columns; ++c) out[c] = all[c];
  }
  static __device__ __forceinline__ void store(float* row, u32 part, const float (&values)[columns]) {
    constexpr int quads = (Row::dim + 3) / 4;
    const int first = first_column(part) / 4;
#pragma unroll
    for (int q = 0; q < static_cast<int>(columns) / 4; ++q) {
      const float* at = values + 4 * q;
      if (first + q >= 0 && first + q < quads)
        store_quad<Row::dim>(row, first + q, make_float4(at[0], at[1], at[2], at[3]));
    }
  }
};

// The same number, hidden from the compiler, so that values that depend on it are computed here. Otherwise the compiler
// computes them before the loop, and holds them in registers for a path that few rows take. No intrinsic does this; the
// assembler sees no instruction.
__device__ __forceinline__ u32 hidden(u32 number) {
  asm volatile("" : "+r"(number));
  return number;
}

// A column of a row that the cache does not hold: of the fetched row, or the default value. Columns outside the row are
// undefined.
template <class Row>
__device__ __forceinline__ float other_column(const Table& table, const float* fetched, u32 part, u32 c) {
  if (!fetched || !Part<Row>::is_real(part, c)) return table.default_value;
  return __ldcg(fetched + Part<Row>::first_column(part) + static_cast<int>(c));
}

// Compute the factor that scales each row of the round. Between barriers.
template <class Row>
__device__ __forceinline__ void measure_norms(const Table& table, float max_norm, const Staged& staged,
                                              Round& round) {
  const u32 lane = threadIdx.x % kNormLanes, count = round.end - round.begin;
#pragma unroll 1
  for (u32 begin = 0; begin < count; begin += kBlockThreads / kNormLanes) {
    const u32 i = begin + threadIdx.x / kNormLanes;
    float squares = 0.0f;
#pragma unroll 1
    for (u32 part = lane; part < Part<Row>::count && i < count; part += kNormLanes) {
      float columns[Part<Row>::columns] = {};
      const i64 number = round.rows[i];
      if (number >= 0) {
        const u8* row = table.rows + number * Row::stride_bytes;
        Part<Row>::decode(Part<Row>::load(row, part), Row::load_parameters(row), columns);
      } else {
        const float* fetched = staged.row(number);
#pragma unroll
        for (u32 c = 0; c < Part<Row>::columns; ++c) columns[c] = other_column<Row>(table, fetched, part, c);
      }
#pragma unroll
      for (u32 c = 0; c < Part<Row>::columns; ++c) {
        if (Part<Row>::is_real(part, c))
          squares = __fadd_rn(squares, __fmul_rn(columns[c], columns[c]));
      }
    }
#pragma unroll
    for (u32 apart = kNormLanes / 2; apart > 0; apart /= 2)
      squares = __fadd_rn(squares, __shfl_xor_sync(kAllLanes, squares, apart));
    const float norm = __fsqrt_rn(squares);
    if (lane == 0 && i < count) round.factors[i] = norm > max_norm ? __fdiv_rn(max_norm, norm) : 1.0f;
  }
}

// By all threads of the block: load the round's rows `begin` .. `end` - 1 that the cache holds into shared memory. They
// are at most kLoadedUnits units. Between barriers.
template <class Row>
__device__ __forceinline__ void load_rows(const Table& table, const Round& round, u32 begin, u32 end, uint4* loaded) {
  constexpr u32 kUnderWay = kLoadedUnits / kBlockThreads;
  const u32 count = (end - begin) * Row::units;
  uint4 units[kUnderWay] = {};
#pragma unroll
  for (u32 k = 0; k < kUnderWay; ++k) {
    const u32 i = threadIdx.x + k * kBlockThreads;
    const i64 row = i < count ? round.rows[begin + i / Row::units] : kNoRow;
    if (row >= 0) units[k] = Row::load_unit(table.rows + row * Row::stride_bytes, i % Row::units);
  }
#pragma unroll
  for (u32 k = 0; k < kUnderWay; ++k) {
    const u32 i = threadIdx.x + k * kBlockThreads;
    if (i < count) loaded[i] = units[k];
  }
}

// The sum of one part's columns over a bag's keys of the round, continued from the rounds before.
template <class Row>
struct PartSum {
  float columns[Part<Row>::columns];
  float total;  // of the weights, or of their squares

  // Add a row; `column(c)` is one of the part's columns.
  template <class Column>
  __device__ __forceinline__ void add(const TableBags& bags, const Round& round, u32 i, Column column) {
    const float weight = round.weights[i], factor = bags.max_norm > 0.0f ? round.factors[i] : 1.0f;
#pragma unroll
    for (u32 c = 0; c < Part<Row>::columns; ++c)
      columns[c] = __fadd_rn(columns[c], __fmul_rn(__fmul_rn(column(c), factor), weight));
    total = __fadd_rn(total, bags.combiner == kSqrtN ? __fmul_rn(weight, weight) : weight);
  }

  // Rows of the cache are loaded several at a time. If the cache does not hold one of them, they are read one by one.
  // Values that are not loaded are zero: see gather_rows.
  __device__ __forceinline__ void add_rows(const Table& table, const TableBags& bags, const Round& round,
                                           const Staged& staged, u32 begin, u32 end, u32 part) {
    constexpr u32 kUnderWay = 4;
#pragma unroll 1
    for (u32 i = begin; i < end; i += kUnderWay) {
      bool all_held = true;
#pragma unroll
      for (u32 k = 0; k < kUnderWay; ++k) all_held = all_held && (i + k >= end || round.rows[i + k] >= 0);
      if (all_held) {
        add_held_rows<kUnderWay>(table, bags, round, i, end, part);
        continue;
      }
#pragma unroll 1
      for (u32 k = i; k < min(i + kUnderWay, end); ++k) {
        if (round.rows[k] >= 0) {
          add_held_rows<1>(table, bags, round, k, k + 1, part);
          continue;
        }
        add_other_row(table, bags, round, staged, k, part);
      }
    }
  }

  // A row that the cache does not hold.
  __device__ __forceinline__ void add_other_row(const Table& table, const TableBags& bags, const Round& round,
                                                const Staged& staged, u32 i, u32 part) {
    const float* fetched = staged.row(round.rows[i]);
    const u32 at = hidden(part);  // else the real columns of each part would be kept in registers
    add(bags, round, i, [&](u32 c) { return other_column<Row>(table, fetched, at, c); });
  }

  // Rows that all threads have loaded into shared memory, from the round's row `first` on.
  __device__ __forceinline__ void add_loaded_rows(const Table& table, const TableBags& bags, const Round& round,
                                                  const Staged& staged, const uint4* loaded, u32 first, u32 begin,
                                                  u32 end, u32 part) {
#pragma unroll 1
    for (u32 i = begin; i < end; ++i) {
      if (round.rows[i] < 0) {
        add_other_row(table, bags, round, staged, i, part);
        continue;
      }
      const uint4* units = loaded + (i - first) * Row::units;
      float row[Part<Row>::columns];
      Part<Row>::decode(Part<Row>::half(units[part / Part<Row>::per_unit], part), Row::parameters_in(units[0]), row);
      add(bags, round, i, [&](u32 c) { return row[c]; });
    }
  }

  template <u32 kUnderWay>
  __device__ __forceinline__ void add_held_rows(const Table& table, const TableBags& bags, const Round& round, u32 i,
                                                u32 end, u32 part) {
    uint4 units[kUnderWay] = {};
    rows::Parameters parameters[kUnderWay] = {};
#pragma unroll
    for (u32 k = 0; k < kUnderWay; ++k) {
      if (i + k >= end) break;
      const u8* row = table.rows + round.rows[i + k] * Row::stride_bytes;
      parameters[k] = Row::load_parameters(row);
      units[k] = Part<Row>::load(row, part);
    }
#pragma unroll
    for (u32 k = 0; k < kUnderWay; ++k) {
      if (i + k >= end) break;
      float row[Part<Row>::columns];
      Part<Row>::decode(units[k], parameters[k], row);
      add(bags, round, i + k, [&](u32 c) { return row[c]; });
    }
  }

  __device__ __forceinline__ void resume(const float* out, u32 part, float begun_total) {
#pragma unroll
    for (u32 c = 0; c < Part<Row>::columns; ++c) {
      if (Part<Row>::is_real(part, c)) columns[c] = out[Part<Row>::first_column(part) + static_cast<int>(c)];
    }
    total = begun_total;
  }

  // Without weights the total is the number of keys, as on the host: a sum of ones ends at 2^24.
  __device__ __forceinline__ void divide(const TableBags& bags, u32 keys) {
    if (bags.combiner == kSum) return;  // a division by 1 changes no bit and costs time
    const float total = bags.weights_at ? this->total : static_cast<float>(keys);
    const float divisor = bags.combiner == kMean ? total : __fsqrt_rn(total);
#pragma unroll
    for (u32 c = 0; c < Part<Row>::columns; ++c)
      columns[c] = divisor == 0.0f ? 0.0f : __fdiv_rn(columns[c], divisor);
  }
};
