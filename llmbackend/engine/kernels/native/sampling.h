// From logits to tokens and logprobs, without sorting the vocabulary.
//
// Used by the sampler; the definitions are those of sampler.py and torch_sampling.py in ../../sampling. Invariant: a
// sample is computed by one worker, only from its logits, its row's parameters and the row's tokens before its
// position; other rows' parameters have no effect.
//
// A row costs one pass over its logits (summary.h). Limits read again only blocks whose largest logit is above a bound;
// of those, only logits above the bound become candidates (ranking.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "numbers.h"
#include "ranking.h"
#include "step.h"
#include "summary.h"
#include "team.h"

namespace llmb {

// One request's changes to its logits: bias, then no stop among the first min_tokens output tokens, then penalties.
struct Edits {
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* stop_ids;
    int32_t num_biases;
    int32_t num_stops;
    int32_t min_tokens;
    float repetition_penalty;  // for tokens in prompt and output; 1 = none
    double frequency_penalty;
    double presence_penalty;

    bool is_empty() const {
        return num_biases == 0 && min_tokens == 0 && repetition_penalty == 1 && frequency_penalty == 0 &&
               presence_penalty == 0;
    }
};

// Parameters by row, and the rows' tokens.
struct SamplingRows {
    const float* temperature;     // 0 = greedy
    const int32_t* top_k;         // 0 = no limit
    const double* top_p;          // 1 = no limit
    const double* min_p;          // 0 = no limit
    const uint64_t* seed;
    const int32_t* num_logprobs;  // -1 = no logprobs
    const Edits* const* edits;    // null = none
    const int32_t* token_ids;     // [rows, token_ids_stride]: prompt, then output
    const int32_t* num_prompt_tokens;
    int64_t token_ids_stride;
};

// The samples of a step: for sample i, the token at positions[i] of rows[i], from row i of the logits.
struct Samples {
    const void* logits;           // [num_samples, stride], float32 or bfloat16
    int64_t stride;
    const int32_t* rows;
    const int32_t* positions;
    int32_t* token_ids;           // out; -1 = the logits are not finite
    float* logprobs;              // out, for samples with logprobs: the token's own,
    int32_t* ranks;               // its rank, from 1,
    int32_t* top_ids;             // and [num_samples, top_stride] the most likely ones
    float* top_logprobs;
    const uint32_t* masks;        // [n, words]: bit t of a row's words: token t is allowed; as in token_masks.py
    const int32_t* mask_index;    // [num_samples]: a sample's row of masks, -1 = all tokens; null = no sample has one
    int32_t top_stride;
    int32_t num_samples;
    int32_t vocab;
    Type logits_type;
};

// The logit of a forbidden token; see FORBIDDEN in ../../token_masks.py.
constexpr float kForbidden = -1e30f;

// One worker's memory.
struct Workspace {
    Candidates found;
    Candidates spare;  // logits, then ids without a gap: Ranking sorts both together
    Summary summary;
    float* peaks_again;
    float* edited;
    int32_t* counts;  // by token; undefined between uses

    Workspace(char* memory, int vocab) {
        float* next = reinterpret_cast<float*>(memory);
        const auto take = [&](size_t count) { return std::exchange(next, next + count); };
        const auto take_ints = [&](size_t count) { return reinterpret_cast<int32_t*>(take(count)); };
        const size_t blocks = room(num_blocks(vocab)), tokens = room(vocab);
        summary.masses = reinterpret_cast<double*>(take(2 * blocks));
        summary.peaks = take(blocks);
        peaks_again = take(blocks);
        spare.logits = take(tokens);
        spare.ids = take_ints(tokens);
        found.logits = take(tokens);
        found.ids = take_ints(tokens);
        edited = take(tokens);
        counts = take_ints(tokens);
    }

    static size_t bytes(int vocab) { return sizeof(float) * (4 * room(num_blocks(vocab)) + 6 * room(vocab)); }

  private:
    // One more vector than requested, in whole cache lines, and never a multiple of a page.
    static size_t room(int count) { return (static_cast<size_t>(count) + 1023) / 1024 * 1024 + 64; }
};

// A number in [0, 1): as uniform in ../../sampling/rows.py.
inline uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
inline double uniform(uint64_t seed, int32_t position) {
    const uint64_t mixed = static_cast<uint64_t>(position) * 0x9E3779B97F4A7C15u;
    return static_cast<double>(splitmix64(splitmix64(seed) ^ mixed) >> 11) * 0x1p-53;
}

// The limits of one draw; see Limits in ../../sampling/torch_sampling.py.
struct Limits {
    int32_t top_k;
    double top_p;
    double min_p;

    bool bounded() const { return top_k > 0 || min_p > 0; }  // otherwise top_p is a share of the whole vocabulary
};

// The block peak that at least `count` peaks reach, and so at least as many logits; minus infinity if there are too few
// blocks. Slightly lower, for logits that become equal when divided by the temperature.
inline float reached_by(int count, const Summary& summary, int vocab, float* again) {
    const int blocks = num_blocks(vocab);
    if (count > blocks) return -kInfinity;
    std::copy(summary.peaks, summary.peaks + blocks, again);
    std::nth_element(again, again + count - 1, again + blocks, [](float a, float b) { return a > b; });
    const float peak = again[count - 1];
    return peak - std::abs(peak) * 1e-6f;
}

// A logit below which no weight e^((x - peak) / temperature) reaches `weight`; slightly lower than necessary.
inline float bound_of(double weight, float peak, float temperature) {
    const double bound = peak + temperature * (std::log(weight) - 1e-3);
    return static_cast<float>(bound - std::abs(peak) * 1e-5);
}

// The logits not below `low`, by id.
template <class T>
inline void collect(const T* x, int vocab, float low, const Summary& summary, Candidates& found) {
    found.count = 0;
    const Ints lanes = lane_numbers();
    for (int b = 0; b < num_blocks(vocab); b++) {
        if (!(summary.peaks[b] >= low)) continue;
        const int begin = b * kBlock, size = std::min(kBlock, vocab - begin);
        with_block(x, vocab, b, [&](const auto* block) {
            for (int i = 0; i < size; i += kLanes) {
                const Floats v = load(block + i);
                found.push(v, lanes + (begin + i), v >= splat(low), std::min(kLanes, size - i));
            }
        });
    }
}

// Draws one token from one row of summarised logits (with masses, unless limits are bounded).
template <class T>
class Draw {
  public:
    Draw(const T* x, int vocab, float temperature, Workspace& space)
        : x_(x), vocab_(vocab), temperature_(temperature), peak_(space.summary.peak / temperature), space_(space) {}

    int operator()(const Limits& limits, double uniform) {
        if (limits.bounded()) return among_bounded(limits, uniform);
        return limits.top_p < 1 ? among_top_p(limits.top_p, uniform) : among_all(uniform);
    }

  private:
    static constexpr double kLeast = 1e-37;  // smaller weights are negligible
    static constexpr double kSlack = 1e-5;   // far more than the possible difference between sums of the same weights

    // In the order of ids: first over blocks, then within one. Never beyond the last with any weight, which rounding
    // could otherwise reach.
    int among_all(double uniform) {
        const Summary& summary = space_.summary;
        const double target = uniform * summary.total;
        double upto = 0, before = 0;
        int block = 0;
        for (int b = 0; b < num_blocks(vocab_) && upto <= target; b++) {
            if (summary.masses[b] > 0) block = b, before = upto;
            upto += summary.masses[b];
        }
        int token = 0;
        with_block(x_, vocab_, block, [&](const auto* logits) { token = inside(logits, target - before); });
        return block * kBlock + token;
    }

    template <class U>
    int inside(const U* block, double target) const {
        float weights[kBlock];
        const Divisor divide(temperature_);
        for (int i = 0; i < kBlock; i += kLanes) store(weights + i, exp(divide(load(block + i)) - splat(peak_)));
        double upto = 0;
        int token = 0;
        for (int i = 0; i < kBlock && upto <= target; i++) {
            if (weights[i] > 0) token = i;
            upto += weights[i];
        }
        return token;
    }

    int among_bounded(const Limits& limits, double uniform) {
        const Summary& summary = space_.summary;
        float low = bound_of(std::max(limits.min_p, kLeast), summary.peak, temperature_);
        if (limits.top_k > 0) low = std::max(low, reached_by(limits.top_k, summary, vocab_, space_.peaks_again));
        Ranking ranking = candidates(low, limits.min_p);
        if (limits.top_k > 0) ranking.keep_first(limits.top_k);
        return among_ranked(ranking, limits.top_p < 1 ? limits.top_p * ranking.mass() : kInfinity, uniform);
    }

    // Usually a few hundred of the most likely tokens contain the share. In a flat distribution the two relevant
    // positions, the end of the kept tokens and the drawn one, are searched for one after the other. If a search fails,
    // all tokens that may be kept are ranked: those left out weigh less than the share leaves over, even if they were
    // the whole vocabulary.
    int among_top_p(double top_p, double uniform) {
        const Summary& summary = space_.summary;
        const double share = top_p * summary.total;
        const int some = std::max(1, num_blocks(vocab_) / 4);
        Ranking ranking = candidates(reached_by(some, summary, vocab_, space_.peaks_again), 0);
        if (ranking.mass() >= share * (1 + kSlack)) return among_ranked(ranking, share, uniform);
        Place last, drawn;
        if (find(share, false, last) && find(uniform * last.upto, true, drawn)) return drawn.id;
        const double weight = std::max((1 - top_p - kSlack) * summary.total / vocab_, kLeast);
        ranking = candidates(bound_of(weight, summary.peak, temperature_), 0);
        return among_ranked(ranking, share, uniform);
    }

    // A token, and the weight of all tokens up to it in the ranking, its own included.
    struct Place {
        int id;
        double upto;
    };

    // As Ranking::first_reaching among all tokens, in one pass: what is above the position only counts by its mass, and
    // what is around it is ranked. False if the position is not where a sample of the logits suggests.
    bool find(double target, bool beyond, Place& place) {
        const auto [low, high] = around(target / space_.summary.total);
        Candidates& found = space_.found;
        found.count = 0;
        WideSum above;
        const Divisor divide(temperature_);
        for (int b = 0; b < num_blocks(vocab_); b++) {
            if (!(space_.summary.peaks[b] / temperature_ >= low)) continue;
            const int begin = b * kBlock, size = std::min(kBlock, vocab_ - begin);
            with_block(x_, vocab_, b, [&](const auto* block) {
                for (int i = 0; i < size; i += kLanes) {
                    const Floats v = divide(load(block + i));
                    const Ints is_above = v >= splat(high);
                    above.add(is_above ? exp(v - splat(peak_)) : Floats{});
                    found.push(v, lane_numbers() + (begin + i), (v >= splat(low)) & ~is_above, std::min(kLanes, size - i));
                }
            });
        }
        Ranking ranking(found, space_.spare, peak_);
        const double before = above.total(), upto = before + ranking.mass();
        if (found.count == 0 || before >= target * (1 - kSlack) || upto <= target * (1 + kSlack)) return false;
        const int at = ranking.first_reaching(target - before, beyond);
        ranking.keep_first(at + 1);
        place = {ranking.id(at), before + ranking.mass()};
        return true;
    }

    // Two quotients (low, high) between which the cumulative sum probably reaches this share, estimated from a sample
    // of the logits.
    std::pair<float, float> around(double share) const {
        constexpr int kSamples = 256, kMargin = 24;
        float samples[kSamples], weights[kSamples];
        for (int64_t i = 0; i < kSamples; i++)
            samples[i] = to_float(x_[vocab_ * (2 * i + 1) / (2 * kSamples)]) / temperature_;
        std::sort(samples, samples + kSamples, [](float a, float b) { return a > b; });
        for (int i = 0; i < kSamples; i += kLanes) store(weights + i, exp(load(samples + i) - splat(samples[0])));
        double total = 0, upto = 0;
        for (float weight : weights) total += weight;
        int middle = 0;
        while (middle < kSamples - 1 && (upto += weights[middle]) < share * total) middle++;
        const float low = middle + kMargin < kSamples ? samples[middle + kMargin] : -kInfinity;
        const float high = middle >= kMargin ? samples[middle - kMargin] : kInfinity;
        return {low, std::max(high, std::nextafter(low, kInfinity))};
    }

    int among_ranked(Ranking& ranking, double share, double uniform) const {
        if (share < kInfinity) ranking.keep_first(ranking.first_reaching(share, false) + 1);
        return ranking.id(ranking.first_reaching(uniform * ranking.mass(), true));
    }

    // The logits from `low` on, divided by the temperature, without those whose weight is below min_p or negligible.
    Ranking candidates(float low, double min_p) {
        collect(x_, vocab_, low, space_.summary, space_.found);
        const Candidates all = space_.found;
        Candidates kept = all;
        kept.count = 0;
        const Floats least = splat(at_least(std::max(min_p, kLeast)));
        const Divisor divide(temperature_);
        for (int i = 0; i < all.count; i += kLanes) {
            const Floats logits = divide(load(all.logits + i));
            const Ints chosen = exp(logits - splat(peak_)) >= least;
            kept.push(logits, load_ints(all.ids + i), chosen, std::min(kLanes, all.count - i));
        }
        return Ranking(kept, space_.spare, peak_);
    }

    // The smallest float not below x: comparing floats with it is equivalent to comparing them with x.
    static float at_least(double x) {
        const float rounded = static_cast<float>(x);
        return rounded >= x ? rounded : std::nextafter(rounded, kInfinity);
    }

    const T* x_;
    int vocab_;
    float temperature_;
    float peak_;
    Workspace& space_;
};

// Edits a copy of a row's logits; `num_tokens` of its tokens are known.
class Editor {
  public:
    Editor(const Edits& edits, const int32_t* token_ids, int num_prompt_tokens, int num_tokens, int vocab)
        : edits_(edits), tokens_(token_ids), num_prompt_(num_prompt_tokens), num_tokens_(num_tokens), vocab_(vocab) {}

    void operator()(float* x, int32_t* counts) const {
        for (int i = 0; i < edits_.num_biases; i++) x[edits_.bias_ids[i]] += edits_.bias_values[i];
        if (num_tokens_ - num_prompt_ < edits_.min_tokens)
            for (int i = 0; i < edits_.num_stops; i++) x[edits_.stop_ids[i]] = -kInfinity;
        if (edits_.repetition_penalty != 1) penalise_repetition(x, counts);
        if (edits_.frequency_penalty != 0 || edits_.presence_penalty != 0) penalise_output(x, counts);
    }

  private:
    // Each token once, however often it occurs.
    void penalise_repetition(float* x, int32_t* counts) const {
        const float penalty = edits_.repetition_penalty;
        for_tokens(0, [&](int32_t token) { counts[token] = 0; });
        for_tokens(0, [&](int32_t token) {
            if (counts[token]++ == 0) x[token] = x[token] > 0 ? x[token] / penalty : x[token] * penalty;
        });
    }

    void penalise_output(float* x, int32_t* counts) const {
        for_tokens(num_prompt_, [&](int32_t token) { counts[token] = 0; });
        for_tokens(num_prompt_, [&](int32_t token) { counts[token]++; });
        for_tokens(num_prompt_, [&](int32_t token) {
            const double amount = edits_.frequency_penalty * counts[token] + edits_.presence_penalty;
            if (counts[token] > 0) x[token] -= static_cast<float>(amount);
            counts[token] = 0;
        });
    }

    template <class F>
    void for_tokens(int begin, F&& f) const {
        for (int i = begin; i < num_tokens_; i++)
            if (tokens_[i] >= 0 && tokens_[i] < vocab_) f(tokens_[i]);
    }

    const Edits& edits_;
    const int32_t* tokens_;
    int num_prompt_, num_tokens_, vocab_;
};

// One sample: its token and, if requested, logprobs.
template <class T>
class Sample {
  public:
    Sample(const SamplingRows& rows, const Samples& samples, int index, Workspace& space)
        : rows_(rows), samples_(samples), index_(index), row_(samples.rows[index]), vocab_(samples.vocab),
          x_(static_cast<const T*>(samples.logits) + index * samples.stride), temperature_(rows.temperature[row_]),
          limits_{rows.top_k[row_], rows.top_p[row_], rows.min_p[row_]}, space_(space) {}

    void operator()() {
        const Edits* edits = rows_.edits[row_];
        const int token = edits ? chosen_after(*edits) : chosen();
        samples_.token_ids[index_] = token;
        if (rows_.num_logprobs[row_] < 0) return;
        const bool summed = !edits && needs_masses() && scale() == 1;
        if (token >= 0 && !summed) summarise<true>(x_, vocab_, 1.0f, space_.summary);
        token >= 0 ? write_logprobs(token) : write_no_logprobs();
    }

  private:
    // The divisor of logits in a summary.
    float scale() const { return temperature_ > 0 ? temperature_ : 1.0f; }

    // Whether the summary needs masses: for the draw, or for logprobs that then get them for free.
    bool needs_masses() const {
        return temperature_ > 0 ? !limits_.bounded() : rows_.num_logprobs[row_] >= 0;
    }

    template <class U>
    void summarise_for_choice(const U* x) {
        needs_masses() ? summarise<true>(x, vocab_, scale(), space_.summary)
                       : summarise<false>(x, vocab_, 1.0f, space_.summary);
    }

    int chosen() {
        summarise_for_choice(x_);
        return space_.summary.finite() ? choice(x_) : -1;
    }

    int chosen_after(const Edits& edits) {
        if (mask() && edits.is_empty()) return chosen_masked();
        summarise<false>(x_, vocab_, 1.0f, space_.summary);
        if (!space_.summary.finite()) return -1;
        for (int i = 0; i < vocab_; i++) space_.edited[i] = to_float(x_[i]);
        const int32_t* tokens = rows_.token_ids + row_ * rows_.token_ids_stride;
        const Editor edit(edits, tokens, rows_.num_prompt_tokens[row_], samples_.positions[index_], vocab_);
        edit(space_.edited, space_.counts);
        apply_mask();
        summarise_for_choice(space_.edited);
        return space_.summary.has_nan ? -1 : choice(space_.edited);
    }

    int chosen_masked() {
        if (!copy_masked(mask())) return -1;
        summarise_for_choice(space_.edited);
        return choice(space_.edited);
    }

    // Null = all tokens are allowed. Only rows with edits have masks.
    const uint32_t* mask() const {
        if (!samples_.mask_index || samples_.mask_index[index_] < 0) return nullptr;
        return samples_.masks + samples_.mask_index[index_] * int64_t{(vocab_ + 31) / 32};
    }

    void apply_mask() {
        const uint32_t* allowed = mask();
        for (int i = 0; allowed && i < vocab_; i++)
            if (!(allowed[i / 32] >> i % 32 & 1)) space_.edited[i] = kForbidden;
    }

    // Makes a fresh masked copy in one pass over the logits. False if they are not finite.
    bool copy_masked(const uint32_t* allowed) {
        Ints nan{};
        Floats top = splat(-kInfinity);
        const int whole = vocab_ / 32;
        for (int w = 0; w < whole; w++) {
            const Ints word = Ints{} + static_cast<int32_t>(allowed[w]);
            for (int i = 0; i < 32; i += kLanes) {
                const Floats v = load(x_ + 32 * w + i);
                nan |= (v != v);
                top = max(top, v);
                const Ints bit = (word >> (lane_numbers() + i)) & 1;
                store(space_.edited + 32 * w + i, bit != Ints{} ? v : splat(kForbidden));
            }
        }
        float peak = max(top);
        bool has_nan = false;
        for (int i = 0; i < kLanes; i++) has_nan |= nan[i] != 0;
        for (int i = 32 * whole; i < vocab_; i++) {
            const float x = to_float(x_[i]);
            has_nan |= x != x;
            peak = std::max(peak, x);
            space_.edited[i] = allowed[whole] >> i % 32 & 1 ? x : kForbidden;
        }
        return !has_nan && std::abs(peak) < kInfinity;
    }

    // A peak made infinite by an edit or the division is chosen without a draw.
    template <class U>
    int choice(const U* x) {
        const bool draws = temperature_ > 0 && std::abs(space_.summary.peak / temperature_) < kInfinity;
        if (!draws) return first_peak(x, vocab_, space_.summary);
        const double number = uniform(rows_.seed[row_], samples_.positions[index_]);
        return Draw<U>(x, vocab_, temperature_, space_)(limits_, number);
    }

    // Of the model's own distribution; the summary is that of the unedited logits.
    void write_logprobs(int token) {
        const Summary& summary = space_.summary;
        const double norm = summary.peak + std::log(summary.total);
        const float own = to_float(x_[token]);
        samples_.logprobs[index_] = static_cast<float>(own - norm);
        samples_.ranks[index_] = 1 + count_above(own);
        const int count = rows_.num_logprobs[row_];
        if (count == 0) return;
        collect(x_, vocab_, reached_by(count, summary, vocab_, space_.peaks_again), summary, space_.found);
        Ranking ranking(space_.found, space_.spare, summary.peak);
        ranking.keep_first(count);
        ranking.sort_all();
        for (int i = 0; i < count; i++) {
            samples_.top_ids[index_ * int64_t{samples_.top_stride} + i] = ranking.id(i);
            samples_.top_logprobs[index_ * int64_t{samples_.top_stride} + i] =
                static_cast<float>(ranking.logit(i) - norm);
        }
    }

    void write_no_logprobs() {
        samples_.logprobs[index_] = 0;
        samples_.ranks[index_] = 0;
        const int64_t begin = index_ * int64_t{samples_.top_stride};
        std::fill_n(samples_.top_ids + begin, rows_.num_logprobs[row_], 0);
        std::fill_n(samples_.top_logprobs + begin, rows_.num_logprobs[row_], 0.0f);
    }

    int count_above(float logit) const {
        Ints above{};
        for (int b = 0; b < num_blocks(vocab_); b++) {
            if (!(space_.summary.peaks[b] > logit)) continue;
            with_block(x_, vocab_, b, [&](const auto* block) {
                for (int i = 0; i < kBlock; i += kLanes) above -= load(block + i) > splat(logit);
            });
        }
        int count = 0;
        for (int i = 0; i < kLanes; i++) count += above[i];
        return count;
    }

    const SamplingRows& rows_;
    const Samples& samples_;
    int index_, row_, vocab_;
    const T* x_;
    float temperature_;
    Limits limits_;
    Workspace& space_;
};

inline size_t sampling_scratch_bytes(const Samples& samples, int num_threads) {
    return Workspace::bytes(samples.vocab) * num_threads;
}

inline void sample(Worker& worker, const SamplingRows& rows, const Samples& samples, char* scratch) {
    Workspace space(scratch + Workspace::bytes(samples.vocab) * worker.rank, samples.vocab);
    worker.share(samples.num_samples, 1, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            if (samples.logits_type == Type::kFloat32)
                Sample<float>(rows, samples, i, space)();
            else
                Sample<bf16>(rows, samples, i, space)();
        }
    });
}

}  // namespace llmb
