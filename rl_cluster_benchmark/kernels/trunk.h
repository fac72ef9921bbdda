/* Passes over a batch, the same for every network: network.c and nature.c include this after their convolutions.
 *
 * They define `Net`, which has a `Dense hidden`, an `int capacity` (samples that it can save) and `float *out` (room
 * for the features of a chunk and their gradient), NAME (which makes the names of the functions here), NUM_CONVS,
 * IMAGE_BYTES, SLOTS (samples that a pass needs room for when it saves none), CHUNK (samples that a training pass in
 * one call takes at a time), and the functions save_room, run_samples, return_samples, begin_gradients and
 * end_gradients.
 */
#include <time.h>

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
static int reserve(Net *net, int saved, int rows) {
    if (saved > net->capacity) net->capacity = save_room(net, saved) ? saved : 0;
    return saved <= net->capacity && dense_reserve(&net->hidden, round_up(rows, 32));
}

/* Write the features to out[batch][hidden]; with `save`, keep what `backward` needs. Returns 0 if there is no memory. */
int NAME(forward)(Net *net, const uint8_t *observations, const int64_t *rows, int batch, int save, float *out) {
    const Images images = {observations, rows, IMAGE_BYTES(net)};
    const int chunk = save ? batch : smaller(batch, 32);
    if (!reserve(net, save ? batch : SLOTS, chunk)) return 0;
    tiles_begin();
    for (int start = 0; start < batch; start += chunk) {
        const int count = smaller(chunk, batch - start);
        run_samples(net, images, start, count, save, net->hidden.inputs);
        dense_forward(&net->hidden, 0, count, out + (long)start * net->hidden.width);
    }
    tiles_end();
    return 1;
}

/* Add the gradients of the batch that was last saved; `out` is what `forward` wrote. With row_inputs, the gradient of
 * the hidden layer's weights is left out: `products` computes it later from the rows of many passes. */
void NAME(backward)(Net *net, const uint8_t *observations, const int64_t *rows, int batch, const float *out,
                    const float *grad_out, const Gradient *gradients, bf16 *row_inputs, bf16 *row_slopes) {
    const Images images = {observations, rows, IMAGE_BYTES(net)};
    tiles_begin();
    begin_gradients(net);
    dense_return(&net->hidden, 0, batch, out, grad_out);
    return_samples(net, images, 0, batch, net->hidden.grad_inputs, gradients);
    dense_gradients(&net->hidden, batch, gradients[NUM_CONVS(net)], (Rows){row_inputs, row_slopes});
    end_gradients(net, gradients);
    tiles_end();
}

/* Forward, losses and backward in one call, CHUNK samples at a time, so that what is saved of them stays in the cache. */
Train NAME(train);
int NAME(train)(void *network, const uint8_t *observations, const int64_t *rows, int batch, Losses *losses, const void *context,
                const Gradient *gradients, bf16 *row_inputs, bf16 *row_slopes, double seconds[3]) {
    Net *net = network;
    Dense *hidden = &net->hidden;
    const Images images = {observations, rows, IMAGE_BYTES(net)};
    if (!net->out) net->out = allocate(sizeof(float) * 2 * CHUNK * hidden->width);
    if (!net->out || !reserve(net, smaller(batch, CHUNK), batch)) return 0;
    float *out = net->out, *grad_out = out + (long)CHUNK * hidden->width;
    double last = now();
    tiles_begin();
    begin_gradients(net);
    for (int start = 0; start < batch; start += CHUNK) {
        const int count = smaller(CHUNK, batch - start);
        const long place = (long)start * hidden->features;
        run_samples(net, images, start, count, 1, hidden->inputs + place);
        dense_forward(hidden, start, count, out);
        last = add_seconds(seconds, last);
        losses(context, start, count, out, grad_out);
        last = add_seconds(seconds + 1, last);
        dense_return(hidden, start, count, out, grad_out);
        return_samples(net, images, start, count, hidden->grad_inputs + place, gradients);
        last = add_seconds(seconds + 2, last);
    }
    dense_gradients(hidden, batch, gradients[NUM_CONVS(net)], (Rows){row_inputs, row_slopes});
    end_gradients(net, gradients);
    tiles_end();
    add_seconds(seconds + 2, last);
    return 1;
}

/* Write columns `first` to `last` of the gradient of the hidden layer's weights, from rows that passes have written.
 * Returns 0 if there is no memory. */
int NAME(products)(Net *net, bf16 *inputs, bf16 *slopes, int samples, int first, int last, float *weights) {
    tiles_begin();
    const int done = dense_products(&net->hidden, (Rows){inputs, slopes}, samples, first, last, weights);
    tiles_end();
    return done;
}
