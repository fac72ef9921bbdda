/* The interface between the library of a network (network.c, nature.c) and that of the heads (heads.c). */
#include <stdint.h>

typedef struct {
    float *weights, *bias;
} Gradient; /* where a layer's gradient is added to */

/* Computes heads and losses: from the features of `count` samples of a pass, from number `first` on, to their
 * gradient. */
typedef void Losses(const void *context, long first, long count, const float *features, float *gradient);

/* Makes a training pass over `batch` rows of the observations and adds to the gradients of the layers. With
 * row_inputs, the gradient of the hidden layer's weights is left out, and a row for each sample is written there and
 * to row_slopes. Adds the seconds of the forward pass, the losses and the backward pass to `seconds`. Returns 0 if
 * there is no memory. */
typedef int Train(void *network, const uint8_t *observations, const int64_t *rows, int batch, Losses *losses,
                  const void *context, const Gradient *gradients, uint16_t *row_inputs, uint16_t *row_slopes, double seconds[3]);
