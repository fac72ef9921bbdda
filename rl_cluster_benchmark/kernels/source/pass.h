/* The interface between a network (network.h) and the heads and losses (heads.h). */
#include <stdint.h>

typedef struct {
    float *weights, *bias;
} Gradient; /* where a layer's gradient is added to */

/* Computes heads and losses: from the features of `count` samples of a pass, from number `first` on, to their gradient.
 * Several threads call it at the same time for different samples. */
typedef void Losses(const void *context, long first, long count, const float *features, float *gradient);

/* Makes a training pass over `batch` rows of the observations, adds to the gradients of the layers, and writes the features to
 * out[batch][width]. With row_inputs, the gradient of the hidden layer's weights is left out, and a row for each sample is
 * written there and to row_slopes. Adds the seconds of the forward pass, the losses and the backward pass to `seconds`.
 * Returns 0 if there is no memory. */
typedef int Train(void *network, const uint8_t *observations, const int64_t *rows, int batch, int threads, Losses *losses,
                  const void *context, const Gradient *gradients, float *out, void *row_inputs, void *row_slopes,
                  double seconds[3]);
