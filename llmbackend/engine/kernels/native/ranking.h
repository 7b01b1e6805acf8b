// Candidates for a draw in the order (logit descending, id ascending), sorted only as far as a query needs it.
//
// Used by sampling. Invariant: answers are those of a full sort followed by cumulative float64 sums; only the grouping
// of the sums depends on how the order was found, and that is a function of the candidates alone.
//
// The candidates are in segments, each above the next. A query for a position in the order splits the segment that
// contains it around a pivot until it is small enough to be sorted.
#pragma once

#include <algorithm>
#include <cstdint>

#include "numbers.h"
#include "summary.h"

namespace llmb {

// A vector beyond the last candidate may be read and written.
struct Candidates {
    float* logits;
    int32_t* ids;
    int count;

    // Appends those of the first `size` lanes that are chosen (lanes of -1, not 0).
    void push(Floats v, Ints numbers, Ints chosen, int size = kLanes) {
#if defined(__AVX512F__)
        const __mmask16 mask = _mm512_test_epi32_mask((__m512i)chosen, (__m512i)chosen) & ((1u << size) - 1);
        _mm512_storeu_ps(logits + count, _mm512_maskz_compress_ps(mask, (__m512)v));
        _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(mask, (__m512i)numbers));
        count += __builtin_popcount(mask);
#else
        for (int i = 0; i < size; i++) {
            logits[count] = v[i];
            ids[count] = numbers[i];
            count -= chosen[i];
        }
#endif
    }
};

// The weight of a candidate is e^(logit - peak).
class Ranking {
  public:
    Ranking(Candidates all, Candidates spare, float peak) : all_(all), spare_(spare), peak_(peak) {
        segments_[0] = {0, all.count, kUnknown, 0, 0, false};
        count_ = all.count > 0;
    }

    int32_t id(int place) const { return all_.ids[place]; }
    float logit(int place) const { return all_.logits[place]; }

    // Drops all but the first `size`.
    void keep_first(int size) {
        for (int s = 0; s < count_;) {
            Segment& segment = segments_[s];
            if (segment.end <= size) {
                s++;
            } else if (segment.begin >= size) {
                count_ = s;
            } else if (sorted(segment)) {
                segment.end = size;
                segment.mass = kUnknown;
                count_ = ++s;
            } else {
                split(s, double(size - segment.begin) / (segment.end - segment.begin), false);
            }
        }
    }

    double mass() {
        double total = 0;
        for (int s = 0; s < count_; s++) total += mass_of(segments_[s]);
        return total;
    }

    // The first position whose cumulative sum, its own weight included, is at least the target (or, with `beyond`,
    // above it); the last position if none is. Everything up to it is then in the right segment.
    int first_reaching(double target, bool beyond) {
        double before = 0;
        for (int s = 0;;) {
            Segment& segment = segments_[s];
            const double mass = mass_of(segment);
            if (!reaches(before + mass, target, beyond) && s + 1 < count_) {
                before += mass;
                s++;
            } else if (sorted(segment)) {
                return segment.low == segment.high ? walk_equal(segment, before, target, beyond)
                                                   : walk(segment, before, target, beyond);
            } else {
                split(s, (target - before) / mass, true);
            }
        }
    }

    // Sorts everything that is left.
    void sort_all() {
        const int end = count_ ? segments_[count_ - 1].end : 0;
        sort(0, end);
    }

  private:
    static constexpr double kUnknown = -1;
    static constexpr int kSmall = 128;        // a segment of at most this size is sorted
    static constexpr int kSampled = 24;       // after this many splits, pivots halve the numbers' range, which
    static constexpr int kMaxSegments = 192;  // limits the splits of a search by the bits of a number

    struct Segment {
        int begin, end;
        double mass;
        float low, high;  // smallest and largest logit, once determined
        bool sorted;
    };

    static bool reaches(double sum, double target, bool beyond) { return beyond ? sum > target : sum >= target; }

    double mass_of(Segment& segment) {
        if (segment.mass == kUnknown) {
            WideSum sum;
            for (int i = segment.begin; i < segment.end; i += kLanes)
                sum.add(lane_numbers() < segment.end - i ? weights(i) : Floats{});
            segment.mass = sum.total();
        }
        return segment.mass;
    }

    // Of the candidates from `place` on; may read beyond the last.
    Floats weights(int place) const { return exp(load(all_.logits + place) - splat(peak_)); }

    // Sorts a segment that is small or has equal logits; otherwise finds its smallest and largest logit.
    bool sorted(Segment& segment) {
        if (segment.sorted) return true;
        const float* logits = all_.logits;
        Floats low = splat(kInfinity), high = splat(-kInfinity);
        int i = segment.begin;
        for (; i + kLanes <= segment.end; i += kLanes) {
            const Floats v = load(logits + i);
            low = v < low ? v : low;
            high = max(high, v);
        }
        segment.high = max(high);
        segment.low = -max(-low);
        for (; i < segment.end; i++) {
            segment.high = std::max(segment.high, logits[i]);
            segment.low = std::min(segment.low, logits[i]);
        }
        segment.sorted = segment.low == segment.high;  // a split preserves the order of ids
        if (!segment.sorted && segment.end - segment.begin <= kSmall) {
            sort(segment.begin, segment.end);
            segment.sorted = true;
        }
        return segment.sorted;
    }

    // Unsigned numbers in the reverse order of floats; both zeros are equal.
    static uint32_t key(float x) {
        x += 0.0f;
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return bits & 0x80000000u ? bits : 0x7fffffffu - bits;
    }
    static float from_key(uint32_t key) {
        const uint32_t bits = key & 0x80000000u ? key : 0x7fffffffu - key;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }

    void sort(int begin, int end) {
        uint64_t* keys = reinterpret_cast<uint64_t*>(spare_.logits);  // the spare ids follow: see Workspace
        for (int i = begin; i < end; i++)
            keys[i - begin] = static_cast<uint64_t>(key(all_.logits[i])) << 32 | static_cast<uint32_t>(all_.ids[i]);
        std::sort(keys, keys + (end - begin));
        for (int i = begin; i < end; i++) {
            all_.logits[i] = from_key(static_cast<uint32_t>(keys[i - begin] >> 32));
            all_.ids[i] = static_cast<int32_t>(keys[i - begin]);
        }
    }

    // Splits a segment into two nonempty ones; `share` of it, by mass or by number, should be above.
    void split(int s, double share, bool by_mass) {
        Segment& segment = segments_[s];
        float pivot = count_ < kSampled ? sampled_pivot(segment, share, by_mass)
                                        : from_key(key(segment.high) / 2 + key(segment.low) / 2);
        if (!(pivot > segment.low)) pivot = segment.high;
        const int middle = partition(segment.begin, segment.end, pivot);
        std::copy_backward(segments_ + s, segments_ + count_, segments_ + count_ + 1);
        count_++;
        segments_[s] = {segments_[s].begin, middle, kUnknown, 0, 0, false};
        segments_[s + 1] = {middle, segments_[s + 1].end, kUnknown, 0, 0, false};
    }

    // From some evenly spaced logits of the segment: the one at `share` of their mass or number.
    float sampled_pivot(const Segment& segment, double share, bool by_mass) const {
        constexpr int kSamples = 32;
        float samples[kSamples], sizes[kSamples];
        const int64_t size = segment.end - segment.begin;
        for (int i = 0; i < kSamples; i++) samples[i] = all_.logits[segment.begin + size * (2 * i + 1) / (2 * kSamples)];
        std::sort(samples, samples + kSamples, [](float a, float b) { return a > b; });
        for (int i = 0; i < kSamples; i += kLanes)
            store(sizes + i, by_mass ? exp(load(samples + i) - splat(segment.high)) : splat(1.0f));
        double total = 0, upto = 0;
        for (float size_of : sizes) total += size_of;
        int i = 0;
        while (i < kSamples - 1 && (upto += sizes[i]) < share * total) i++;
        return samples[i];
    }

    // Moves logits not below the pivot to the front, preserving the order on both sides. Returns the border.
    int partition(int begin, int end, float pivot) {
        Candidates above{all_.logits, all_.ids, begin}, below{spare_.logits, spare_.ids, 0};
        for (int i = begin; i < end; i += kLanes) {
            const Floats v = load(all_.logits + i);
            const Ints ids = load_ints(all_.ids + i);
            const int size = std::min(kLanes, end - i);
            const Ints high = v >= splat(pivot);
            above.push(v, ids, high, size);
            below.push(v, ids, ~high, size);
        }
        std::memcpy(all_.logits + above.count, below.logits, below.count * sizeof(float));
        std::memcpy(all_.ids + above.count, below.ids, below.count * sizeof(int32_t));
        return above.count;
    }

    int walk(const Segment& segment, double before, double target, bool beyond) const {
        float sizes[kSmall + kLanes];
        const int size = segment.end - segment.begin;
        for (int i = 0; i < size; i += kLanes) store(sizes + i, weights(segment.begin + i));
        int i = 0;
        while (i < size - 1 && !reaches(before += sizes[i], target, beyond)) i++;
        return segment.begin + i;
    }

    // All weights are equal: the position is a quotient, give or take one.
    int walk_equal(const Segment& segment, double before, double target, bool beyond) const {
        const double weight = weights(segment.begin)[0];
        const int last = segment.end - segment.begin - 1;
        int i = static_cast<int>(std::clamp((target - before) / weight - 2, 0.0, static_cast<double>(last)));
        while (i < last && !reaches(before + (i + 1) * weight, target, beyond)) i++;
        return segment.begin + i;
    }

    Candidates all_;
    Candidates spare_;
    float peak_;
    Segment segments_[kMaxSegments];
    int count_;
};

}  // namespace llmb
