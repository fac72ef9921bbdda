/* Every function of a library in C, called with memory that malloc left unwritten wherever they only write, by several
 * threads.
 *
 * For MemorySanitizer and valgrind, which see a branch, an address or a result that depends on memory nobody has written,
 * and for ThreadSanitizer, which sees memory that two threads use with nothing between. They watch a whole program: there is
 * no Python here.
 */
#include <stdio.h>

#ifdef AMX
#include "amx/amx.c"
typedef bf16 Row;
#else
#include "source/network.c"
typedef float Row;
#endif

#ifndef SAMPLES
#define SAMPLES 37
#endif
enum { THREADS = 3, PIECES = 3, MOST_LAYERS = 24, PADDED = (SAMPLES + 31) / 32 * 32 };
static int64_t actions[SAMPLES], order[SAMPLES];

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

static Minibatch minibatch_of(long width, long num_actions) {
    for (int i = 0; i < SAMPLES; i++) actions[i] = i % num_actions, order[i] = SAMPLES - 1 - i;
    return (Minibatch){
        {width, num_actions, numbers(width * num_actions), numbers(num_actions), numbers(width), numbers(1)},
        {0.1f, 1.1f, SAMPLES, 0.2f, 1, 0.5f, 0.01f},
        actions, numbers(SAMPLES), numbers(SAMPLES), numbers(SAMPLES), numbers(SAMPLES), numbers(SAMPLES),
    };
}

static Vector vector_of(const Gradient *trunk, long width, long num_actions) {
    float *policy = zeros(width * num_actions), *value = zeros(width);
    return (Vector){trunk, policy, zeros(num_actions), value, zeros(1), zeros(5), {policy, value}, {width * num_actions, width}};
}

static void look_at_heads(const Vector *vector, long width, long num_actions) {
    look_at(vector->policy_weight, 4 * width * num_actions);
    look_at(vector->policy_bias, 4 * num_actions);
    look_at(vector->value_weight, 4 * width);
    look_at(vector->value_bias, 4);
    look_at(vector->statistics, 4 * 5);
}

static void heads(long num_actions, long width) {
    const Minibatch minibatch = minibatch_of(width, num_actions);
    const Vector vector = vector_of(NULL, width, num_actions);
    const long written = num_actions + 1 + STATISTICS;
    const Samples samples = {&minibatch, order, malloc(4 * SAMPLES * written)};
    float *features = numbers(width * SAMPLES), *gradient = malloc(4 * width * SAMPLES), *noise = numbers(num_actions * SAMPLES);
    forget(noise + 1, 4);
    heads_pass(&samples, 0, SAMPLES, features, gradient);
    heads_add(&samples, SAMPLES, features, &vector);
    look_at(gradient, 4 * width * SAMPLES), look_at(samples.written, 4 * SAMPLES * written);
    look_at_heads(&vector, width, num_actions);
    int64_t *chosen = malloc(8 * SAMPLES);
    float *log_probs = malloc(4 * SAMPLES), *values = malloc(4 * SAMPLES);
    heads_act(&minibatch.heads, SAMPLES, features, noise, chosen, log_probs, values);
    look_at(chosen, 8 * SAMPLES), look_at(log_probs, 4 * SAMPLES), look_at(values, 4 * SAMPLES);
}

static void passes(Network *net, int height, int width, int hidden, int layers, const long (*shapes)[2]) {
    if (!net) exit(2);
    const float *weights[MOST_LAYERS], *biases[MOST_LAYERS];
    Gradient gradients[MOST_LAYERS];
    for (int i = 0; i < layers; i++) {
        weights[i] = numbers(shapes[i][0] * shapes[i][1]), biases[i] = numbers(shapes[i][0]);
        gradients[i] = (Gradient){zeros(shapes[i][0] * shapes[i][1]), zeros(shapes[i][0])};
    }
    network_pack(net, weights, biases);
    const long image = 3L * height * width, features = shapes[layers - 1][1];
    uint8_t *observations = malloc(image * SAMPLES);
    for (long i = 0; i < image * SAMPLES; i++) observations[i] = (uint8_t)(i * 2654435761u >> 13);
    forget(observations + image, 1);
    float *out = malloc(4L * hidden * SAMPLES), *slopes = numbers((long)hidden * SAMPLES);
    const Minibatch minibatch = minibatch_of(hidden, 15);
    if (!network_forward(net, observations, order, SAMPLES, 0, THREADS, out)) exit(2);
    look_at(out, 4L * hidden * SAMPLES);
    if (!network_forward(net, observations, NULL, SAMPLES, 1, THREADS, out)) exit(2);
    look_at(out, 4L * hidden * SAMPLES);
    if (!network_backward(net, observations, NULL, SAMPLES, THREADS, out, slopes, gradients, NULL, NULL)) exit(2);
    const long input_bytes = sizeof(Row) * features, slope_bytes = sizeof(Row) * hidden;
    char *row_inputs = malloc(PADDED * input_bytes), *row_slopes = malloc(PADDED * slope_bytes);
    memset(row_inputs + SAMPLES * input_bytes, 0, (PADDED - SAMPLES) * input_bytes);
    memset(row_slopes + SAMPLES * slope_bytes, 0, (PADDED - SAMPLES) * slope_bytes);
    double seconds[3] = {0};
    const Vector vectors[PIECES] = {vector_of(gradients, hidden, 15), vector_of(gradients, hidden, 15), vector_of(gradients, hidden, 15)};
    const Trunk trunk = {net, network_train, THREADS, observations, row_inputs, row_slopes, input_bytes, slope_bytes, seconds};
    if (minibatch_add(&minibatch, &trunk, order, SAMPLES, 0, vectors, 0) != SAMPLES) exit(2);
    look_at(row_inputs, PADDED * input_bytes), look_at(row_slopes, PADDED * slope_bytes), look_at(seconds, sizeof seconds);
    float *product = malloc(4L * hidden * features);
    if (!network_products(net, THREADS, row_inputs, row_slopes, SAMPLES, 0, 64, product)) exit(2);
    if (!network_products(net, THREADS, row_inputs, row_slopes, SAMPLES, 64, (int)features, product)) exit(2);
    look_at(product, 4L * hidden * features);
    int ends[2];
    const int64_t bounds[PIECES + 1] = {0, 1, 20, SAMPLES}, pieces[] = {2, 0, 1};
    const Trunk adding = {net, network_train, THREADS, observations, NULL, NULL, 0, 0, seconds};
    if (pipe(ends) || write(ends[1], pieces, sizeof pieces) != sizeof pieces || close(ends[1])) exit(2);
    if (minibatch_take(&minibatch, &adding, order, bounds, 0, vectors, ends[0]) != SAMPLES) exit(2);
    close(ends[0]);
    for (int i = 0; i < PIECES; i++) look_at_heads(vectors + i, hidden, 15);
    for (int i = 0; i < layers; i++) {
        look_at(gradients[i].weights, 4 * shapes[i][0] * shapes[i][1]);
        look_at(gradients[i].bias, 4 * shapes[i][0]);
    }
    network_destroy(net);
}

static void impala(int height, int width, int stages, const int *channels, int hidden) {
    long shapes[MOST_LAYERS][2], before = 3;
    int layers = 0;
    for (int s = 0; s < stages; s++, before = channels[s - 1])
        for (int i = 0; i < 5; i++, layers++) shapes[layers][0] = channels[s], shapes[layers][1] = 9 * (i ? channels[s] : before);
    shapes[layers][0] = hidden, shapes[layers][1] = before * (height >> stages) * (width >> stages);
    passes(impala_create(height, width, stages, channels, hidden), height, width, hidden, layers + 1, (const long(*)[2])shapes);
}

static void nature(int hidden) {
    const long shapes[][2] = {{32, 192}, {64, 512}, {64, 576}, {hidden, 1024}};
    passes(nature_create(64, 64, 3, (const int[]){32, 64, 64}, hidden), 64, 64, hidden, 4, shapes);
}

int main(void) {
    heads(1, 1), heads(33, 18), heads(256, 15);
    puts("heads: clean");
    impala(16, 16, 1, (const int[]){48}, 32);
    impala(32, 32, 2, (const int[]){16, 32}, 64);
    impala(16, 64, 1, (const int[]){32}, 32);
    puts("impala: clean");
    nature(32);
    puts("nature: clean");
    return 0;
}
