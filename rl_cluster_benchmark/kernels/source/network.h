/* Passes of a network over a batch: a few samples at a time go through all layers, so that what is kept of them stays in the
 * cache; threads share the samples.
 *
 * Gradients are summed over blocks of BLOCK samples, and the blocks are added in their order: so neither the number of threads
 * nor how many samples are taken at a time changes a bit.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "pass.h"

#define CHUNK 2  /* samples that go through the layers together: what is saved of more does not stay in a core's own cache */
#define BLOCK 32 /* samples whose gradients are summed before they are added to those of the others */
#define MOST_THREADS 256

typedef struct Network Network;
typedef struct Work Work; /* the memory of one thread */

/* The observations of a pass: those with the numbers in `rows`, or, where that is NULL, all from the first on. */
typedef struct {
    const uint8_t *first;
    const int64_t *rows;
    long size; /* bytes of one observation */
} Observations;

INLINE const uint8_t *observation(Observations from, long i) { return from.first + (from.rows ? from.rows[i] : i) * from.size; }

/* What an architecture has to say: impala.h and nature.h. */
typedef struct {
    void *(*make_own)(const Network *net); /* memory of a thread; NULL if there is none */
    void (*destroy_own)(void *own);
    /* Run `count` samples, at most CHUNK, from number `start` on; write what `back` needs, and the inputs of the hidden layer. */
    void (*run)(const Network *net, void *own, Observations from, long start, int count, float *saved, float *inputs);
    /* Add their gradients to those of the thread. */
    void (*back)(const Network *net, void *own, Observations from, long start, int count, const float *saved, const float *grad);
    /* Add the gradients of the thread to these, and clear them. */
    void (*add)(const Network *net, void *own, const Gradient *gradients);
    void (*pack)(Network *net, const float *const *weights, const float *const *biases);
    void (*destroy)(Network *net);
} Architecture;

/* Memory that grows. */
typedef struct {
    float *first;
    long size;
} Buffer;

struct Network {
    const Architecture *is;
    int num_convs;
    long observation_bytes, saved_size; /* floats that are saved of a sample */
    Dense hidden;
    Work *works[MOST_THREADS];
    void *layers;                       /* the architecture's */
    Buffer inputs, slopes, saved;       /* of all samples of a pass */
};

struct Work {
    float *saved, *features, *room; /* of a chunk: saved; features or their gradient; what dense_gradient needs */
    void *own;                      /* the architecture's */
};

typedef struct {
    Network *net;
    Observations from;
    int batch, is_forward, is_backward;
    Losses *losses;
    const void *context;
    const Gradient *gradients;
    float *saved, *inputs, *out, *slopes; /* of all samples; all but `out` may be NULL */
    atomic_int next;                      /* block that nobody has taken */
    int added;                            /* blocks whose gradients have been added */
    float *gradient;                      /* of the hidden layer's weights: columns `first` to `last` */
    int first, last, threads;
    pthread_mutex_t lock;
    pthread_cond_t turn;
    double seconds[3];
} Pass;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* ---- Threads ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    Pass *pass;
    void (*function)(Pass *pass, Work *work);
    Work *work;
} Share;

static void *run_share(void *argument) {
    const Share *share = argument;
    share->function(share->pass, share->work);
    return NULL;
}

/* Call the function in this many threads, which take what is to do from the pass until nothing is left. They live no longer
 * than the call: none is there to be forked, and none waits. */
static void share_out(Pass *pass, int threads, void (*function)(Pass *, Work *)) {
    Share shares[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    int count = 1;
    pass->next = 0;
    pass->threads = threads;
    for (; count < threads; count++) {
        shares[count] = (Share){pass, function, pass->net->works[count]};
        if (pthread_create(&started[count], NULL, run_share, &shares[count])) break; /* then the others do all */
    }
    function(pass, pass->net->works[0]);
    for (int i = 1; i < count; i++) pthread_join(started[i], NULL);
}

/* ---- Passes ------------------------------------------------------------------------------------------------------------- */

static void pass_block(Pass *pass, Work *work, long first, long last, double seconds[3]) {
    Network *net = pass->net;
    const Dense *hidden = &net->hidden;
    for (long start = first; start < last; start += CHUNK) {
        const int count = smaller(CHUNK, (int)(last - start));
        float *saved = pass->saved ? pass->saved + start * net->saved_size : work->saved;
        float *inputs = pass->inputs ? pass->inputs + start * hidden->features : work->features;
        float *out = pass->out + start * hidden->width, *slopes = pass->slopes ? pass->slopes + start * hidden->width : NULL;
        double times[4] = {now()};
        if (pass->is_forward) {
            net->is->run(net, work->own, pass->from, start, count, saved, inputs);
            dense_forward(hidden, inputs, count, out);
        }
        times[1] = times[2] = now();
        if (pass->losses) pass->losses(pass->context, start, count, out, slopes), times[2] = now();
        if (pass->is_backward) {
            dense_backward(hidden, inputs, out, count, slopes, work->features);
            net->is->back(net, work->own, pass->from, start, count, saved, work->features);
        }
        times[3] = now();
        for (int i = 0; i < 3; i++) seconds[i] += times[i + 1] - times[i];
    }
}

static void pass_blocks(Pass *pass, Work *work) {
    const long size = pass->is_backward ? BLOCK : CHUNK;
    double seconds[3] = {0};
    for (int block; (block = atomic_fetch_add(&pass->next, 1)) * size < pass->batch;) {
        pass_block(pass, work, block * size, smaller(pass->batch, (int)((block + 1) * size)), seconds);
        if (!pass->is_backward) continue;
        pthread_mutex_lock(&pass->lock);
        while (pass->added != block) pthread_cond_wait(&pass->turn, &pass->lock);
        pass->net->is->add(pass->net, work->own, pass->gradients);
        pass->added++;
        pthread_cond_broadcast(&pass->turn);
        pthread_mutex_unlock(&pass->lock);
    }
    pthread_mutex_lock(&pass->lock);
    for (int i = 0; i < 3; i++) pass->seconds[i] += seconds[i];
    pthread_mutex_unlock(&pass->lock);
}

/* Add the gradients of the hidden layer: each element is a sum over all samples in order, whoever computes it. */
static void hidden_ranges(Pass *pass, Work *work) {
    const int parts = (pass->last - pass->first) / FEATURES;
    for (int i; (i = atomic_fetch_add(&pass->next, 1)) < pass->threads;)
        dense_gradient(&pass->net->hidden, pass->inputs, pass->slopes, pass->batch, pass->first + parts * i / pass->threads * FEATURES,
                       pass->first + parts * (i + 1) / pass->threads * FEATURES, pass->gradient, work->room);
}

/* ---- The memory of passes ------------------------------------------------------------------------------------------------ */

static int reserve(Buffer *buffer, long size) {
    if (size <= buffer->size) return 1;
    free(buffer->first);
    buffer->first = allocate(size);
    buffer->size = buffer->first ? size : 0;
    return buffer->first != NULL;
}

static void destroy_work(Network *net, int i) {
    Work *work = net->works[i];
    if (!work) return;
    if (work->own) net->is->destroy_own(work->own);
    free(work->saved), free(work->features), free(work->room), free(work);
    net->works[i] = NULL;
}

static int make_works(Network *net, int threads) {
    for (int i = 0; i < threads; i++) {
        if (net->works[i]) continue;
        Work *work = net->works[i] = calloc(1, sizeof *work);
        if (!work) return 0;
        work->saved = allocate(CHUNK * net->saved_size), work->features = allocate(CHUNK * (long)net->hidden.features);
        work->room = allocate(SAMPLES_AT_ONCE * (long)(net->hidden.width + FEATURES)), work->own = net->is->make_own(net);
        if (!work->saved || !work->features || !work->room || !work->own) return destroy_work(net, i), 0;
    }
    return 1;
}

/* ---- What Python calls ----------------------------------------------------------------------------------------------------- */

/* Make a pass in at most this many threads; return 0 if there is no memory. */
static int make_pass(Pass *pass, int threads, void *row_slopes) {
    Network *net = pass->net;
    const Dense *hidden = &net->hidden;
    const int unit = pass->is_backward ? BLOCK : CHUNK;
    threads = smaller(smaller(threads, MOST_THREADS), (pass->batch + unit - 1) / unit);
    if (threads < 1) threads = 1;
    if (!make_works(net, threads)) return 0;
    pthread_mutex_init(&pass->lock, NULL), pthread_cond_init(&pass->turn, NULL);
    share_out(pass, threads, pass_blocks);
    pthread_mutex_destroy(&pass->lock), pthread_cond_destroy(&pass->turn);
    for (int i = 0; i < 3; i++) pass->seconds[i] /= threads;
    if (!pass->is_backward) return 1;
    const double start = now();
    const Gradient gradient = pass->gradients[net->num_convs];
    for (long i = 0; i < pass->batch; i++)
        for (int c = 0; c < hidden->width; c++) gradient.bias[c] += pass->slopes[i * hidden->width + c];
    if (row_slopes) memcpy(row_slopes, pass->slopes, sizeof(float) * pass->batch * hidden->width);
    else pass->gradient = gradient.weights, pass->last = hidden->features, share_out(pass, threads, hidden_ranges);
    pass->seconds[2] += now() - start;
    return 1;
}

/* Write the features to out[batch][hidden]; with `save`, keep what `network_backward` needs. Returns 0 if there is no memory. */
int network_forward(Network *net, const uint8_t *observations, const int64_t *rows, int batch, int save, int threads, float *out) {
    if (save && !(reserve(&net->saved, batch * net->saved_size) && reserve(&net->inputs, (long)batch * net->hidden.features))) return 0;
    Pass pass = {.net = net, .from = {observations, rows, net->observation_bytes}, .batch = batch, .is_forward = 1, .out = out};
    if (save) pass.saved = net->saved.first, pass.inputs = net->inputs.first;
    return make_pass(&pass, threads, NULL);
}

/* Add the gradients of the batch that was last saved; `out` is what `network_forward` wrote. With row_inputs, the gradient of
 * the hidden layer's weights is left out: `network_products` computes it later from the rows of many passes. */
int network_backward(Network *net, const uint8_t *observations, const int64_t *rows, int batch, int threads, const float *out,
                     const float *grad_out, const Gradient *gradients, void *row_inputs, void *row_slopes) {
    const long size = (long)batch * net->hidden.width;
    if (!reserve(&net->slopes, size)) return 0;
    memcpy(net->slopes.first, grad_out, sizeof(float) * size);
    Pass pass = {.net = net, .from = {observations, rows, net->observation_bytes}, .batch = batch, .is_backward = 1,
                 .gradients = gradients, .saved = net->saved.first, .inputs = net->inputs.first, .out = (float *)out,
                 .slopes = net->slopes.first};
    if (row_inputs) memcpy(row_inputs, pass.inputs, sizeof(float) * batch * net->hidden.features);
    return make_pass(&pass, threads, row_slopes);
}

/* Forward, losses and backward in one call, CHUNK samples at a time, so that what is saved of them stays in the cache. */
Train network_train;
int network_train(void *network, const uint8_t *observations, const int64_t *rows, int batch, int threads, Losses *losses,
                  const void *context, const Gradient *gradients, float *out, void *row_inputs, void *row_slopes,
                  double seconds[3]) {
    Network *net = network;
    if (!reserve(&net->slopes, (long)batch * net->hidden.width)) return 0;
    if (!row_inputs && !reserve(&net->inputs, (long)batch * net->hidden.features)) return 0;
    Pass pass = {.net = net, .from = {observations, rows, net->observation_bytes}, .batch = batch, .is_forward = 1,
                 .is_backward = 1, .losses = losses, .context = context, .gradients = gradients,
                 .inputs = row_inputs ? row_inputs : net->inputs.first, .out = out, .slopes = net->slopes.first};
    const int done = make_pass(&pass, threads, row_slopes);
    for (int i = 0; i < 3; i++) seconds[i] += pass.seconds[i];
    return done;
}

/* Write columns `first` to `last`, multiples of FEATURES, of the gradient of the hidden layer's weights, from rows that passes
 * have written. Returns 0 if there is no memory. */
int network_products(Network *net, int threads, void *inputs, void *slopes, int samples, int first, int last, float *weights) {
    const long features = net->hidden.features;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (!make_works(net, threads)) return 0;
    for (int c = 0; c < net->hidden.width; c++) memset(weights + c * features + first, 0, sizeof(float) * (last - first));
    Pass pass = {.net = net, .batch = samples, .inputs = inputs, .slopes = slopes, .gradient = weights, .first = first, .last = last};
    share_out(&pass, threads, hidden_ranges);
    return 1;
}

/* Take weights[i] and biases[i]: those of the convolutions in order, [out][height][width][in], of which it makes copies, then those
 * of the hidden layer, [hidden][features], which are read in place: copies would not fit into the cache that workers share. */
void network_pack(Network *net, const float *const *weights, const float *const *biases) {
    net->is->pack(net, weights, biases);
    net->hidden.weights = weights[net->num_convs], net->hidden.bias = biases[net->num_convs];
}

void network_destroy(Network *net) {
    for (int i = 0; i < MOST_THREADS; i++) destroy_work(net, i);
    if (net->layers) net->is->destroy(net);
    free(net->inputs.first), free(net->slopes.first), free(net->saved.first);
    free(net);
}

/* Return a network without convolutions, or NULL if the width is none that this code computes, or there is no memory. */
static Network *make_network(const Architecture *is, long observation_bytes, int num_convs, long features, int width) {
    if (width < 32 || width % 32) return NULL;
    Network *net = calloc(1, sizeof *net);
    if (!net) return NULL;
    net->is = is, net->observation_bytes = observation_bytes, net->num_convs = num_convs;
    net->hidden = (Dense){.features = (int)features, .width = width};
    return net;
}
