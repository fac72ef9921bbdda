/* Between a network's library and that of the heads: what each knows of the other. */
#include <stdint.h>

typedef struct {
    float *weights, *bias;
} Gradient; /* of a layer */

/* What lies behind the features: from those of `count` samples of a pass, from number `first` on, to their gradient. */
typedef void Losses(const void *context, long first, long count, const float *features, float *gradient);

/* A training pass over some rows of the observations, in one call, which adds to the gradients of the layers. With row_inputs,
 * those of the hidden layer's weights are left out, and a row for each sample is left there. Adds the seconds that went
 * forward, into the losses, and backward. 0 if there is no memory. */
typedef int Train(void *network, const uint8_t *observations, const int64_t *rows, int batch, Losses *losses,
                  const void *context, const Gradient *gradients, uint16_t *row_inputs, uint16_t *row_slopes, double seconds[3]);
