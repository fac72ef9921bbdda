/* Every function of the libraries in C, called with memory that malloc left unwritten wherever they only write.
 *
 * For MemorySanitizer and for valgrind, which see a branch, an address or a result that depends on memory nobody has written.
 * Both watch a whole program: there is no Python here. With WITHOUT_NETWORK only what needs no AVX-512, which valgrind lacks.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pass.h"

typedef struct {
    float advantage_mean, advantage_scale, num_samples, clip_range;
    int32_t clip_values;
    float value_coefficient, entropy_coefficient;
} Objective;

typedef struct {
    long width, num_actions;
    const float *policy_weight, *policy_bias, *value_weight, *value_bias;
} Heads;

typedef struct {
    const Gradient *trunk;
    float *policy_weight, *policy_bias, *value_weight, *value_bias, *statistics;
    float *written[2];
    long sizes[2];
} Vector;

typedef struct {
    Heads heads;
    Objective objective;
    const int64_t *actions;
    const float *log_probs, *values, *advantages, *returns, *valid;
    const int64_t *rows;
    const Vector *to;
} Minibatch;

typedef struct {
    void *network;
    Train *train;
    const uint8_t *observations;
    long most;
    uint16_t *row_inputs, *row_slopes;
    long features, width;
    double *seconds;
} Trunk;

extern Losses heads_pass;
void heads_act(const Heads *, long, const float *, const float *, int64_t *, float *, float *);
long minibatch_add(Minibatch *, const Trunk *, const int64_t *, long, long, const Vector *, int);
long minibatch_take(Minibatch *, const Trunk *, const int64_t *, const int64_t *, long, const Vector *, int);
#define POOL(name, type)                                                                  \
    void pool_forward_##name(const type *, type *, uint8_t *, int, int, int, int, int);   \
    void pool_backward_##name(const type *, const uint8_t *, type *, int, int, int, int, int);
POOL(float, float)
POOL(bfloat16, uint16_t)
#define NETWORK(name)                                                                                                       \
    void *name##_create(int, int, int, const int *, int);                                                                   \
    void name##_destroy(void *);                                                                                            \
    void name##_pack(void *, const float *const *, const float *const *);                                                   \
    int name##_forward(void *, const uint8_t *, const int64_t *, int, int, float *);                                        \
    void name##_backward(void *, const uint8_t *, const int64_t *, int, const float *, const float *, const Gradient *,     \
                         uint16_t *, uint16_t *);                                                                           \
    int name##_products(void *, uint16_t *, uint16_t *, int, int, int, float *);                                            \
    extern Train name##_train;
NETWORK(network)
NETWORK(nature)

/* Depend on every byte: what is not written is reported here. */
static void look_at(const void *from, long size) {
    const unsigned char *bytes = from;
    unsigned sum = 0;
    for (long i = 0; i < size; i++) {
        if (bytes[i] == 77) sum++;
    }
    if (sum == 0xffffffff) puts("never");
}

static float *numbers(long count) {
    float *made = malloc(sizeof(float) * count);
    for (long i = 0; i < count; i++) made[i] = (float)((i * 2654435761u % 2001) - 1000.0) / 5000;
    return made;
}

/* For a test of the test: memory as malloc gives it, in the middle of what the code in C reads. */
static void forget(void *at, long size) {
#ifdef PLANTED
    void *unwritten = malloc(size);
    memcpy(at, unwritten, size);
#else
    (void)at, (void)size;
#endif
}

static float *zeros(long count) { return calloc(count, sizeof(float)); }

enum { SAMPLES = 21, PIECES = 3 };
static int64_t actions[SAMPLES], order[SAMPLES];

static Minibatch minibatch_of(long width, long num_actions) {
    for (int i = 0; i < SAMPLES; i++) actions[i] = i % num_actions, order[i] = SAMPLES - 1 - i;
    return (Minibatch){
        {width, num_actions, numbers(width * num_actions), numbers(num_actions), numbers(width), numbers(1)},
        {0.1f, 1.1f, SAMPLES, 0.2f, 1, 0.5f, 0.01f},
        actions, numbers(SAMPLES), numbers(SAMPLES), numbers(SAMPLES), numbers(SAMPLES), numbers(SAMPLES), order, NULL,
    };
}

static Vector vector_of(const Gradient *trunk, long width, long num_actions) {
    return (Vector){trunk, zeros(width * num_actions), zeros(num_actions), zeros(width), zeros(1), zeros(5), {NULL, NULL}, {0, 0}};
}

static void look_at_heads(const Vector *vector, long width, long num_actions) {
    look_at(vector->policy_weight, 4 * width * num_actions);
    look_at(vector->policy_bias, 4 * num_actions);
    look_at(vector->value_weight, 4 * width);
    look_at(vector->statistics, 4 * 5);
}

static void heads(long width, long num_actions) {
    Minibatch minibatch = minibatch_of(width, num_actions);
    const Vector vector = vector_of(NULL, width, num_actions);
    float *features = numbers(width * SAMPLES), *gradient = malloc(4 * width * SAMPLES), *noise = numbers(num_actions * SAMPLES);
    forget(noise + 1, 4);
    minibatch.to = &vector;
    heads_pass(&minibatch, 0, SAMPLES, features, gradient);
    look_at(gradient, 4 * width * SAMPLES);
    look_at_heads(&vector, width, num_actions);
    int64_t *chosen = malloc(8 * SAMPLES);
    float *log_probs = malloc(4 * SAMPLES), *values = malloc(4 * SAMPLES);
    heads_act(&minibatch.heads, SAMPLES, features, noise, chosen, log_probs, values);
    look_at(chosen, 8 * SAMPLES), look_at(log_probs, 4 * SAMPLES), look_at(values, 4 * SAMPLES);
}

static void pooling(int batch, int height, int width, int channels) {
    const long in = (long)batch * height * width * channels, out = (long)batch * ((height + 1) / 2) * ((width + 1) / 2) * channels;
    float *images = numbers(in), *pooled = malloc(4 * out), *back = malloc(4 * in);
    uint8_t *winners = malloc(out);
    pool_forward_float(images, pooled, winners, batch, height, width, channels, 1);
    pool_backward_float(pooled, winners, back, batch, height, width, channels, 1);
    look_at(pooled, 4 * out), look_at(winners, out), look_at(back, 4 * in);
    uint16_t *small = malloc(2 * in), *small_pooled = malloc(2 * out), *small_back = malloc(2 * in);
    for (long i = 0; i < in; i++) memcpy(small + i, (char *)(images + i) + 2, 2);
    pool_forward_bfloat16(small, small_pooled, winners, batch, height, width, channels, 1);
    pool_backward_bfloat16(small_pooled, winners, small_back, batch, height, width, channels, 1);
    look_at(small_pooled, 2 * out), look_at(winners, out), look_at(small_back, 2 * in);
}

#ifndef WITHOUT_NETWORK
enum { MOST_LAYERS = 24, PADDED = 32 };

typedef struct {
    void *(*create)(int, int, int, const int *, int);
    void (*destroy)(void *), (*pack)(void *, const float *const *, const float *const *);
    int (*forward)(void *, const uint8_t *, const int64_t *, int, int, float *);
    void (*backward)(void *, const uint8_t *, const int64_t *, int, const float *, const float *, const Gradient *, uint16_t *,
                     uint16_t *);
    int (*products)(void *, uint16_t *, uint16_t *, int, int, int, float *);
    Train *train;
} Functions;

static void network(Functions f, int height, int width, int stages, const int *channels, int hidden, int layers,
                    const long (*shapes)[2]) {
    void *net = f.create(height, width, stages, channels, hidden);
    if (!net) exit(2);
    const float *weights[MOST_LAYERS], *biases[MOST_LAYERS];
    Gradient gradients[MOST_LAYERS];
    for (int i = 0; i < layers; i++) {
        weights[i] = numbers(shapes[i][0] * shapes[i][1]), biases[i] = numbers(shapes[i][0]);
        gradients[i] = (Gradient){zeros(shapes[i][0] * shapes[i][1]), zeros(shapes[i][0])};
    }
    f.pack(net, weights, biases);
    const long image = 3L * height * width, features = shapes[layers - 1][1];
    uint8_t *observations = malloc(image * SAMPLES);
    for (long i = 0; i < image * SAMPLES; i++) observations[i] = (uint8_t)(i * 2654435761u >> 13);
    forget(observations + image, 1);
    float *out = malloc(4L * hidden * SAMPLES), *slopes = numbers((long)hidden * SAMPLES);
    Minibatch minibatch = minibatch_of(hidden, 15);
    if (!f.forward(net, observations, order, SAMPLES, 0, out)) exit(2);
    look_at(out, 4L * hidden * SAMPLES);
    if (!f.forward(net, observations, NULL, SAMPLES, 1, out)) exit(2);
    look_at(out, 4L * hidden * SAMPLES);
    f.backward(net, observations, NULL, SAMPLES, out, slopes, gradients, NULL, NULL);
    uint16_t *row_inputs = malloc(2 * PADDED * features), *row_slopes = malloc(2L * PADDED * hidden);
    memset(row_inputs + SAMPLES * features, 0, 2 * (PADDED - SAMPLES) * features);
    memset(row_slopes + SAMPLES * hidden, 0, 2L * (PADDED - SAMPLES) * hidden);
    double seconds[3] = {0};
    const Vector vectors[PIECES] = {vector_of(gradients, hidden, 15), vector_of(gradients, hidden, 15), vector_of(gradients, hidden, 15)};
    const Trunk trunk = {net, f.train, observations, 17, row_inputs, row_slopes, features, hidden, seconds};
    if (minibatch_add(&minibatch, &trunk, order, SAMPLES, 0, vectors, 0) != SAMPLES) exit(2);
    look_at(row_inputs, 2 * PADDED * features), look_at(row_slopes, 2L * PADDED * hidden);
    float *product = malloc(4L * hidden * features);
    if (!f.products(net, row_inputs, row_slopes, SAMPLES, 0, 48, product)) exit(2);
    if (!f.products(net, row_inputs, row_slopes, SAMPLES, 48, (int)features, product)) exit(2);
    look_at(product, 4L * hidden * features);
    int ends[2];
    const int64_t bounds[PIECES + 1] = {0, 1, 20, SAMPLES}, pieces[] = {2, 0, 1};
    if (pipe(ends) || write(ends[1], pieces, sizeof pieces) != sizeof pieces || close(ends[1])) exit(2);
    if (minibatch_take(&minibatch, &trunk, order, bounds, 0, vectors, ends[0]) != SAMPLES) exit(2);
    close(ends[0]);
    for (int i = 0; i < PIECES; i++) look_at_heads(vectors + i, hidden, 15);
    for (int i = 0; i < layers; i++) {
        look_at(gradients[i].weights, 4 * shapes[i][0] * shapes[i][1]);
        look_at(gradients[i].bias, 4 * shapes[i][0]);
    }
    f.destroy(net);
}

static void impala(int height, int width, int stages, const int *channels, int hidden) {
    long shapes[MOST_LAYERS][2], before = 3;
    int layers = 0;
    for (int s = 0; s < stages; s++, before = channels[s - 1])
        for (int i = 0; i < 5; i++, layers++) shapes[layers][0] = channels[s], shapes[layers][1] = 9 * (i ? channels[s] : before);
    shapes[layers][0] = hidden, shapes[layers][1] = before * (height >> stages) * (width >> stages);
    const Functions functions = {network_create, network_destroy, network_pack, network_forward, network_backward, network_products,
                                 &network_train};
    network(functions, height, width, stages, channels, hidden, layers + 1, (const long(*)[2])shapes);
}

static void nature(int hidden) {
    const int channels[] = {32, 64, 64};
    const long shapes[][2] = {{32, 192}, {64, 512}, {64, 576}, {hidden, 1024}};
    const Functions functions = {nature_create, nature_destroy, nature_pack, nature_forward, nature_backward, nature_products,
                                 &nature_train};
    network(functions, 64, 64, 3, channels, hidden, 4, shapes);
}
#endif

int main(void) {
    heads(1, 1), heads(33, 18), heads(256, 15);
    pooling(1, 1, 1, 16), pooling(2, 1, 2, 48), pooling(2, 7, 9, 32);
    puts("heads and pooling: clean");
#ifndef WITHOUT_NETWORK
    impala(16, 16, 1, (const int[]){48}, 32);
    impala(32, 32, 2, (const int[]){16, 32}, 64);
    impala(16, 64, 1, (const int[]){32}, 32);
    nature(32);
    puts("networks: clean");
#endif
    return 0;
}
