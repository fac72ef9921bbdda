/* The policy head and the value head: choosing actions, and, in training passes of PPO and A2C, the losses of each
 * sample and their gradient at the heads and the features. Also whole minibatches, for which this code calls the network.
 *
 * In torch this part of a training pass takes some sixty small operations. Between two passes of the network, which
 * push everything else out of the cache, they take as long as the network takes for one or two images; here,
 * microseconds.
 *
 * The formulas are those of experience/rollout.py, algorithms/ppo.py, algorithms/a2c.py and learning/network_pass.py.
 * Everything is float32; weights are [outputs, features].
 */
#include <unistd.h>

#define MAX_ACTIONS 256
#define STATISTICS 5

typedef struct {
    float advantage_mean, advantage_scale; /* advantages are normalised with these */
    float num_samples;                     /* samples of the minibatch that are experience */
    float clip_range;                      /* PPO's; negative for A2C's plain policy gradient */
    int32_t clip_values;
    float value_coefficient, entropy_coefficient;
} Objective;

typedef struct {
    long width, num_actions;
    const float *policy_weight, *policy_bias, *value_weight, *value_bias;
} Heads;

/* The memory that passes add to: gradients of the network's layers and of the heads, and the five statistics. */
typedef struct {
    const Gradient *trunk;
    float *policy_weight, *policy_bias, *value_weight, *value_bias, *statistics;
    float *written[2]; /* the same memory as two contiguous runs, for clearing it */
    long sizes[2];
} Vector;

/* A minibatch: data of all samples of the batch, [T * N] each. */
typedef struct {
    Heads heads;
    Objective objective;
    const int64_t *actions;
    const float *log_probs, *values, *advantages, *returns, *valid;
} Minibatch;

/* Some samples of a minibatch: their rows in the batch; and what is written for each of them, the slopes of the loss at the
 * logits and the value, and the statistics. */
typedef struct {
    const Minibatch *minibatch;
    const int64_t *rows;
    float *written;
} Samples;

typedef struct {
    float loss, slope;
} Sloped;

INLINE float dot(long count, const float *a, const float *b) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

INLINE void add_scaled(long count, float scale, const float *from, float *to) {
#pragma omp simd
    for (long i = 0; i < count; i++) to[i] += scale * from[i];
}

/* These two return NaN where an argument is NaN. */
INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }

INLINE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

INLINE float value_of(const Heads *heads, const float *x) { return dot(heads->width, x, heads->value_weight) + heads->value_bias[0]; }

/* Logits -> logarithms of probabilities, and the probabilities. */
INLINE void log_softmax(long count, float *logits, float *probabilities) {
    float largest = -INFINITY, total = 0;
    for (long j = 0; j < count; j++) largest = larger(largest, logits[j]);
    for (long j = 0; j < count; j++) total += probabilities[j] = expf(logits[j] - largest);
    const float log_total = logf(total);
    for (long j = 0; j < count; j++) {
        logits[j] = logits[j] - largest - log_total; /* in this order: logits may be large */
        probabilities[j] /= total;
    }
}

INLINE void logits_of(const Heads *heads, const float *x, float *logits) {
    for (long j = 0; j < heads->num_actions; j++)
        logits[j] = dot(heads->width, x, heads->policy_weight + j * heads->width) + heads->policy_bias[j];
}

/* Write for each sample the action with the largest sum of logit and noise, its log-probability, and the value. */
void heads_act(const Heads *heads, long count, const float *features, const float *noise, int64_t *actions, float *log_probs,
               float *values) {
    float logits[MAX_ACTIONS], policy[MAX_ACTIONS];
    for (long i = 0; i < count; i++, features += heads->width, noise += heads->num_actions) {
        logits_of(heads, features, logits);
        long action = 0;
        float best = logits[0] + noise[0];
        for (long j = 1; j < heads->num_actions; j++) {
            const float score = logits[j] + noise[j];
            if (score > best || (score != score && best == best)) action = j, best = score; /* NaN is the largest */
        }
        log_softmax(heads->num_actions, logits, policy);
        actions[i] = action, log_probs[i] = logits[action], values[i] = value_of(heads, features);
    }
}

INLINE Sloped policy_loss(const Objective *to, float advantage, float log_prob, float ratio) {
    if (to->clip_range < 0) return (Sloped){-advantage * log_prob, -advantage};
    const float loss = -advantage * ratio, clipped = -advantage * clamp(ratio, 1 - to->clip_range, 1 + to->clip_range);
    return (Sloped){larger(loss, clipped), clipped > loss ? 0 : loss}; /* the slope along log_prob is the loss itself */
}

INLINE Sloped value_loss(const Objective *to, float value, float old_value, float target) {
    const float error = value - target, loss = error * error;
    if (to->clip_range < 0 || !to->clip_values) return (Sloped){0.5f * loss, error};
    const float change = value - old_value;
    const float near = old_value + clamp(change, -to->clip_range, to->clip_range) - target, clipped = near * near;
    const int is_flat = clipped > loss && fabsf(change) > to->clip_range; /* within the range they differ by rounding */
    return (Sloped){0.5f * larger(loss, clipped), is_flat ? 0 : error};
}

/* For `count` samples of a pass, from number `first` on, with these features: write their slopes and statistics, and the
 * gradient of the features. Threads may do so for different samples at the same time. */
Losses heads_pass;
void heads_pass(const void *context, long first, long count, const float *features, float *features_gradient) {
    const Samples *samples = context;
    const Minibatch *minibatch = samples->minibatch;
    const Heads *heads = &minibatch->heads;
    const Objective *to = &minibatch->objective;
    const long width = heads->width, num_actions = heads->num_actions;
    float log_policy[MAX_ACTIONS], policy[MAX_ACTIONS];
    for (long i = 0; i < count; i++) {
        const long row = samples->rows[first + i], action = minibatch->actions[row];
        const float *x = features + i * width, weight = minibatch->valid[row] / to->num_samples;
        float *slopes = samples->written + (first + i) * (num_actions + 1 + STATISTICS), *statistics = slopes + num_actions + 1;
        float *gradient = features_gradient + i * width, entropy = 0;
        logits_of(heads, x, log_policy);
        log_softmax(num_actions, log_policy, policy);
        for (long j = 0; j < num_actions; j++) entropy -= policy[j] * log_policy[j];
        const float log_prob = log_policy[action], value = value_of(heads, x);
        const float log_ratio = log_prob - minibatch->log_probs[row], ratio = expf(log_ratio);
        const float advantage = (minibatch->advantages[row] - to->advantage_mean) / to->advantage_scale;
        const Sloped of_policy = policy_loss(to, advantage, log_prob, ratio);
        const Sloped of_value = value_loss(to, value, minibatch->values[row], minibatch->returns[row]);
        const float along_log_prob = weight * of_policy.slope, along_value = to->value_coefficient * weight * of_value.slope;
        const float along_entropy = -to->entropy_coefficient * weight;

        slopes[num_actions] = along_value;
        for (long k = 0; k < width; k++) gradient[k] = along_value * heads->value_weight[k];
        /* With p the policy and H its entropy, d log p_a / d logit_j = [a = j] - p_j, d H / d logit_j = -p_j (log p_j + H). */
        for (long j = 0; j < num_actions; j++) {
            slopes[j] = -policy[j] * (along_log_prob + along_entropy * (log_policy[j] + entropy));
            if (j == action) slopes[j] += along_log_prob;
            add_scaled(width, slopes[j], heads->policy_weight + j * width, gradient);
        }
        statistics[0] = weight * of_policy.loss;
        statistics[1] = weight * of_value.loss;
        statistics[2] = weight * entropy;
        statistics[3] = weight * (ratio - 1 - log_ratio);
        statistics[4] = to->clip_range >= 0 && fabsf(ratio - 1) > to->clip_range ? weight : 0;
    }
}

/* Add to the gradients of the heads and to the statistics what was written for these samples, one after the other. */
void heads_add(const Samples *samples, long count, const float *features, const Vector *to) {
    const long width = samples->minibatch->heads.width, num_actions = samples->minibatch->heads.num_actions;
    const float *slopes = samples->written;
    for (long i = 0; i < count; i++, features += width, slopes += num_actions + 1 + STATISTICS) {
        for (long j = 0; j < num_actions; j++) {
            add_scaled(width, slopes[j], features, to->policy_weight + j * width);
            to->policy_bias[j] += slopes[j];
        }
        add_scaled(width, slopes[num_actions], features, to->value_weight);
        to->value_bias[0] += slopes[num_actions];
        for (int j = 0; j < STATISTICS; j++) to->statistics[j] += slopes[num_actions + 1 + j];
    }
}

/* ---- A minibatch, the network included ------------------------------------------------------------------------------- */

typedef struct {
    void *network;
    Train *train;
    int threads;
    const uint8_t *observations;
    char *row_inputs, *row_slopes;  /* rows of the hidden layer, one for each sample of the minibatch, or NULL */
    long input_bytes, slope_bytes;  /* of such a row */
    double *seconds;
} Trunk;

/* Add the gradient of `count` samples, whose first is number `place` of the minibatch, to a vector, which is cleared
 * first if `clear`. Returns `count`; -1 if there is no memory. */
long minibatch_add(const Minibatch *minibatch, const Trunk *trunk, const int64_t *rows, long count, long place, const Vector *to,
                   int clear) {
    for (int i = 0; i < 2 && clear; i++) memset(to->written[i], 0, sizeof(float) * to->sizes[i]);
    if (!count) return 0;
    const long width = minibatch->heads.width, written = minibatch->heads.num_actions + 1 + STATISTICS;
    float *features = malloc(sizeof(float) * count * (width + written));
    if (!features) return -1;
    const Samples samples = {minibatch, rows, features + count * width};
    const int done = trunk->train(trunk->network, trunk->observations, rows, (int)count, trunk->threads, heads_pass, &samples,
                                  to->trunk, features, trunk->row_inputs ? trunk->row_inputs + place * trunk->input_bytes : NULL,
                                  trunk->row_slopes ? trunk->row_slopes + place * trunk->slope_bytes : NULL, trunk->seconds);
    if (done) heads_add(&samples, count, features, to);
    free(features);
    return done ? count : -1;
}

/* Take numbers of pieces of shared samples from a pipe until it is empty, and write each piece's gradient to its own
 * vector. Piece i is rows[bounds[i]] to rows[bounds[i + 1] - 1]. Returns the number of samples; -1 if there is no
 * memory. */
long minibatch_take(const Minibatch *minibatch, const Trunk *trunk, const int64_t *rows, const int64_t *bounds, long place,
                    const Vector *vectors, int pipe) {
    long samples = 0;
    for (int64_t i; read(pipe, &i, sizeof i) == sizeof i;) {
        const long start = bounds[i];
        const long count = minibatch_add(minibatch, trunk, rows + start, bounds[i + 1] - start, place + start, vectors + i, 1);
        if (count < 0) return -1;
        samples += count;
    }
    return samples;
}
