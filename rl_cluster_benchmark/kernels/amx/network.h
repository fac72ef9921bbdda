/* Passes of a network over a batch, in one thread, in bfloat16 with float sums and float weights.
 *
 * What Python calls is the same as in ../source/network.h; its number of threads does not matter here.
 */
#include <time.h>

typedef struct Network Network;

/* What an architecture has to say: impala.h and nature.h. */
typedef struct {
    int slots, chunk; /* samples that a pass needs room for when it saves none; that a training pass takes at a time */
    int (*save_room)(Network *net, long samples);
    /* Run samples, from number `start` of the images on, through the convolutions; without `save`, all use the same memory. */
    void (*run)(Network *net, Images images, long start, int count, int save, bf16 *features);
    /* Take the samples that were saved last back, from the gradient of their features; add to the gradients of the layers. */
    void (*back)(Network *net, Images images, long start, int count, bf16 *grad, const Gradient *gradients);
    void (*end)(Network *net, const Gradient *gradients); /* after the last of them: add what is summed elsewhere */
    void (*pack)(Network *net, const float *const *weights, const float *const *biases);
    void (*destroy)(Network *net);
} Architecture;

struct Network { /* the first member of Impala and Nature */
    const Architecture *is;
    int num_convs, capacity; /* samples that can be saved */
    long image_bytes;
    Dense hidden;
    float *grad_out;         /* of the samples that a training pass takes at a time */
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

INLINE double add_seconds(double *seconds, double since) {
    const double time = now();
    *seconds += time - since;
    return time;
}

/* Make room to save `saved` samples, and for `rows` samples in the hidden layer. Returns 0 if there is no memory. */
static int reserve(Network *net, int saved, int rows) {
    if (saved > net->capacity) net->capacity = net->is->save_room(net, saved) ? saved : 0;
    return saved <= net->capacity && dense_reserve(&net->hidden, round_up(rows, 32));
}

/* Write the features to out[batch][hidden]; with `save`, keep what `network_backward` needs. Returns 0 if there is no memory. */
int network_forward(Network *net, const uint8_t *observations, const int64_t *rows, int batch, int save, int threads, float *out) {
    (void)threads;
    const Images images = {observations, rows, net->image_bytes};
    const int chunk = save ? batch : smaller(batch, 32);
    if (!reserve(net, save ? batch : net->is->slots, chunk)) return 0;
    tiles_begin();
    for (int start = 0; start < batch; start += chunk) {
        const int count = smaller(chunk, batch - start);
        net->is->run(net, images, start, count, save, net->hidden.inputs);
        dense_forward(&net->hidden, 0, count, out + (long)start * net->hidden.width);
    }
    tiles_end();
    return 1;
}

/* Add the gradients of the batch that was last saved; `out` is what `network_forward` wrote. With row_inputs, the gradient of
 * the hidden layer's weights is left out: `network_products` computes it later from the rows of many passes. */
int network_backward(Network *net, const uint8_t *observations, const int64_t *rows, int batch, int threads, const float *out,
                     const float *grad_out, const Gradient *gradients, void *row_inputs, void *row_slopes) {
    (void)threads;
    tiles_begin();
    dense_return(&net->hidden, 0, batch, out, grad_out);
    net->is->back(net, (Images){observations, rows, net->image_bytes}, 0, batch, net->hidden.grad_inputs, gradients);
    dense_gradients(&net->hidden, batch, gradients[net->num_convs], (Rows){row_inputs, row_slopes});
    net->is->end(net, gradients);
    tiles_end();
    return 1;
}

/* Forward, losses and backward in one call, a few samples at a time, so that what is saved of them stays in the cache. */
Train network_train;
int network_train(void *network, const uint8_t *observations, const int64_t *rows, int batch, int threads, Losses *losses,
                  const void *context, const Gradient *gradients, float *out, void *row_inputs, void *row_slopes,
                  double seconds[3]) {
    (void)threads;
    Network *net = network;
    Dense *hidden = &net->hidden;
    const Images images = {observations, rows, net->image_bytes};
    const int chunk = net->is->chunk;
    if (!reserve(net, smaller(batch, chunk), batch)) return 0;
    double last = now();
    tiles_begin();
    for (int start = 0; start < batch; start += chunk, out += (long)chunk * hidden->width) {
        const int count = smaller(chunk, batch - start);
        const long place = (long)start * hidden->features;
        net->is->run(net, images, start, count, 1, hidden->inputs + place);
        dense_forward(hidden, start, count, out);
        last = add_seconds(seconds, last);
        losses(context, start, count, out, net->grad_out);
        last = add_seconds(seconds + 1, last);
        dense_return(hidden, start, count, out, net->grad_out);
        net->is->back(net, images, start, count, hidden->grad_inputs + place, gradients);
        last = add_seconds(seconds + 2, last);
    }
    dense_gradients(hidden, batch, gradients[net->num_convs], (Rows){row_inputs, row_slopes});
    net->is->end(net, gradients);
    tiles_end();
    add_seconds(seconds + 2, last);
    return 1;
}

/* Write columns `first` to `last` of the gradient of the hidden layer's weights, from rows that passes have written; after them
 * come zeros, up to a multiple of 32 rows. Returns 0 if there is no memory. */
int network_products(Network *net, int threads, void *inputs, void *slopes, int samples, int first, int last, float *weights) {
    (void)threads;
    tiles_begin();
    const int done = dense_products(&net->hidden, (Rows){inputs, slopes}, samples, first, last, weights);
    tiles_end();
    return done;
}

/* Pack weights[i] and biases[i]: those of the convolutions in order, [out][height][width][in], then those of the hidden layer,
 * [hidden][features]. */
void network_pack(Network *net, const float *const *weights, const float *const *biases) {
    net->is->pack(net, weights, biases);
    dense_pack(&net->hidden, weights[net->num_convs], biases[net->num_convs]);
}

void network_destroy(Network *net) {
    net->is->destroy(net);
    dense_destroy(&net->hidden);
    free(net->grad_out), free(net);
}

/* Return a zeroed structure of this size, which begins with the network, or NULL if the width is none that this code computes,
 * the system does not allow tiles, or there is no memory. */
static void *make_network(const Architecture *is, long size, long image_bytes, int num_convs, long features, int width) {
    Network *net = tiles_allowed() ? calloc(1, size) : NULL;
    if (!net) return NULL;
    net->is = is, net->image_bytes = image_bytes, net->num_convs = num_convs;
    net->grad_out = allocate(sizeof(float) * is->chunk * width);
    return dense_create(&net->hidden, (int)features, width) && net->grad_out ? net : (network_destroy(net), NULL);
}
