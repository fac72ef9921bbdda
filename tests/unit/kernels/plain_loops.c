/* Both networks in C against plain loops in double precision: features and all gradients, whichever function makes them.
 *
 * A program of its own, so that it can be compiled for another kind of CPU and run by an emulator (test_variants.py). Prints
 * the relative errors; the exit status is 1 if they are too large.
 */
#include <stdio.h>

#include "network.c"

#define FEW_SAMPLES {1, 3, 37} /* rounding may switch a unit or choose another winner; of one of these it must not */
#define ERROR 1e-5
#define ERROR_OF_DECISIONS 0.1

static uint32_t state = 1;

static uint32_t any(void) { return state = state * 1664525u + 1013904223u, state >> 8; }

static double between(double low, double high) { return low + (high - low) * any() / (1 << 24); }

/* ---- Plain loops ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int height, width, channels;
    double *at; /* [height][width][channels] */
} Image;

/* A convolution; a linear layer is one of an image of a single pixel. */
typedef struct {
    int in, out, kernel, stride, padding;
    float *weights, *bias; /* [out][kernel][kernel][in] */
    double *weights_gradient, *bias_gradient;
} Layer;

static Image image_of(int height, int width, int channels) {
    return (Image){height, width, channels, calloc((long)height * width * channels, sizeof(double))};
}

static long size_of(Image image) { return (long)image.height * image.width * image.channels; }

static long patch_of(const Layer *layer) { return (long)layer->kernel * layer->kernel * layer->in; }

static double *pixel(Image image, int y, int x) {
    const int is_inside = y >= 0 && y < image.height && x >= 0 && x < image.width;
    return is_inside ? image.at + ((long)y * image.width + x) * image.channels : NULL;
}

/* Visit each product of a convolution: output o of pixel y, x has the weight w for input i of another pixel. */
#define FOR_EACH_PRODUCT(layer, input, output)                                                                  \
    for (int y = 0; y < output.height; y++)                                                                     \
        for (int x = 0; x < output.width; x++)                                                                  \
            for (int o = 0; o < layer->out; o++)                                                                \
                for (int k = 0, s = layer->stride, p = layer->padding; k < layer->kernel * layer->kernel; k++)  \
                    for (int i = 0; i < layer->in && pixel(input, s * y + k / layer->kernel - p, s * x + k % layer->kernel - p); i++)
#define INPUT(layer, input) pixel(input, s * y + k / layer->kernel - p, s * x + k % layer->kernel - p)[i]
#define WEIGHT(layer) ((o * (long)layer->kernel * layer->kernel + k) * layer->in + i)

static Image convolved(const Layer *layer, Image input) {
    const int shrinks = 2 * layer->padding - layer->kernel;
    const Image output = image_of((input.height + shrinks) / layer->stride + 1, (input.width + shrinks) / layer->stride + 1, layer->out);
    FOR_EACH_PRODUCT(layer, input, output) pixel(output, y, x)[o] += INPUT(layer, input) * layer->weights[WEIGHT(layer)];
    for (long j = 0; j < size_of(output); j++) output.at[j] += layer->bias[j % layer->out];
    return output;
}

/* Add to the layer's gradients; return the gradient of the input from that of the output. */
static Image convolved_back(Layer *layer, Image input, Image slopes) {
    const Image back = image_of(input.height, input.width, input.channels);
    FOR_EACH_PRODUCT(layer, input, slopes) {
        layer->weights_gradient[WEIGHT(layer)] += pixel(slopes, y, x)[o] * INPUT(layer, input);
        INPUT(layer, back) += pixel(slopes, y, x)[o] * layer->weights[WEIGHT(layer)];
    }
    for (long j = 0; j < size_of(slopes); j++) layer->bias_gradient[j % layer->out] += slopes.at[j];
    return back;
}

static Image rectified(Image input) {
    const Image output = image_of(input.height, input.width, input.channels);
    for (long j = 0; j < size_of(input); j++) output.at[j] = input.at[j] > 0 ? input.at[j] : 0;
    return output;
}

static Image rectified_back(Image input, Image slopes) {
    const Image back = image_of(input.height, input.width, input.channels);
    for (long j = 0; j < size_of(input); j++) back.at[j] = input.at[j] > 0 ? slopes.at[j] : 0;
    return back;
}

/* The first of the largest inputs of a window. */
static double *winner(Image input, int y, int x, int c) {
    double *best = NULL;
    for (int k = 0; k < 9; k++) {
        double *one = pixel(input, 2 * y + k / 3 - 1, 2 * x + k % 3 - 1);
        if (one && (!best || one[c] > *best)) best = one + c;
    }
    return best;
}

static Image pooled(Image input) {
    const Image output = image_of(input.height / 2, input.width / 2, input.channels);
    for (int y = 0; y < output.height; y++)
        for (int x = 0; x < output.width; x++)
            for (int c = 0; c < output.channels; c++) pixel(output, y, x)[c] = *winner(input, y, x, c);
    return output;
}

static Image pooled_back(Image input, Image slopes) {
    const Image back = image_of(input.height, input.width, input.channels);
    for (int y = 0; y < slopes.height; y++)
        for (int x = 0; x < slopes.width; x++)
            for (int c = 0; c < slopes.channels; c++) back.at[winner(input, y, x, c) - input.at] += pixel(slopes, y, x)[c];
    return back;
}

static Image sum(Image a, Image b) {
    const Image both = image_of(a.height, a.width, a.channels);
    for (long j = 0; j < size_of(a); j++) both.at[j] = a.at[j] + b.at[j];
    return both;
}

/* ---- The networks: each takes an image to its features and a gradient back to the layers --------------------------------- */

typedef Image Plain(Layer *layers, int num_layers, Image observation, const float *slopes);

static Image as_one_pixel(Image image) { return (Image){1, 1, (int)size_of(image), image.at}; }

/* The last layer and the gradient at its input, for a gradient at its output of `slopes`. */
static Image hidden(Layer *layer, Image input, const float *slopes, Image *back) {
    const Image output = convolved(layer, as_one_pixel(input)), behind = image_of(1, 1, layer->out);
    for (int c = 0; c < layer->out; c++) behind.at[c] = slopes[c];
    back->at = convolved_back(layer, as_one_pixel(input), rectified_back(output, behind)).at;
    back->height = input.height, back->width = input.width, back->channels = input.channels;
    return rectified(output);
}

static Image plain_impala(Layer *layers, int num_layers, Image observation, const float *slopes) {
    Image x[32][10], back, grad;
    const int stages = (num_layers - 1) / 5;
    for (int s = 0; s < stages; s++) {
        Image *made = x[s];
        const Layer *layer = layers + 5 * s;
        made[0] = s ? x[s - 1][9] : observation;
        made[1] = convolved(layer, made[0]), made[2] = pooled(made[1]);
        made[3] = rectified(made[2]), made[4] = convolved(layer + 1, made[3]);
        made[5] = sum(made[2], convolved(layer + 2, rectified(made[4])));
        made[6] = rectified(made[5]), made[7] = convolved(layer + 3, made[6]);
        made[9] = sum(made[5], convolved(layer + 4, rectified(made[7])));
    }
    const Image last = x[stages - 1][9], features = hidden(layers + num_layers - 1, rectified(last), slopes, &back);
    grad = rectified_back(last, back);
    for (int s = stages - 1; s >= 0; s--) {
        Image *made = x[s];
        Layer *layer = layers + 5 * s;
        for (int block = 1; block >= 0; block--) {
            const Image outer = made[block ? 5 : 2], inner = made[block ? 7 : 4];
            back = rectified_back(inner, convolved_back(layer + 2 * block + 2, rectified(inner), grad));
            grad = sum(grad, rectified_back(outer, convolved_back(layer + 2 * block + 1, rectified(outer), back)));
        }
        grad = convolved_back(layer, made[0], pooled_back(made[1], grad));
    }
    return features;
}

static Image plain_nature(Layer *layers, int num_layers, Image observation, const float *slopes) {
    Image x[4] = {observation}, before[3], back;
    for (int i = 0; i < 3; i++) before[i] = convolved(layers + i, x[i]), x[i + 1] = rectified(before[i]);
    const Image features = hidden(layers + num_layers - 1, x[3], slopes, &back);
    for (int i = 2; i >= 0; i--) back = convolved_back(layers + i, x[i], rectified_back(before[i], back));
    return features;
}

/* ---- Comparison ------------------------------------------------------------------------------------------------------------ */

static void fill(Layer *layer) {
    const long size = layer->out * patch_of(layer);
    const double most = sqrt(3.0 / patch_of(layer));
    layer->weights = malloc(sizeof(float) * size), layer->bias = malloc(sizeof(float) * layer->out);
    for (long i = 0; i < size; i++) layer->weights[i] = (float)between(-most, most);
    for (int i = 0; i < layer->out; i++) layer->bias[i] = (float)between(-0.5, 1);
    layer->weights_gradient = calloc(size, sizeof(double)), layer->bias_gradient = calloc(layer->out, sizeof(double));
}

static double error_of(const float *ours, const double *theirs, long count) {
    double difference = 0, size = 0;
    for (long i = 0; i < count; i++) difference += (ours[i] - theirs[i]) * (ours[i] - theirs[i]), size += theirs[i] * theirs[i];
    return difference == difference ? sqrt(difference / size) : INFINITY;
}

static Gradient *cleared(Gradient *gradients, const Layer *layers, int num_layers) {
    for (int i = 0; i < num_layers; i++) {
        memset(gradients[i].weights, 0, sizeof(float) * layers[i].out * patch_of(layers + i));
        memset(gradients[i].bias, 0, sizeof(float) * layers[i].out);
    }
    return gradients;
}

/* Note the largest error of the features and of any gradient. */
static void compare(const float *out, const double *features, long size, const Gradient *gradients, const Layer *layers, int num_layers,
                    double errors[2]) {
    errors[0] = fmax(errors[0], error_of(out, features, size));
    for (int i = 0; i < num_layers; i++) {
        errors[1] = fmax(errors[1], error_of(gradients[i].weights, layers[i].weights_gradient, layers[i].out * patch_of(layers + i)));
        errors[1] = fmax(errors[1], error_of(gradients[i].bias, layers[i].bias_gradient, layers[i].out));
    }
}

/* The losses of a training pass: their gradient is given. */
typedef struct {
    const float *slopes;
    long width;
} Given;

static void losses(const void *context, long first, long count, const float *features, float *gradient) {
    const Given *given = context;
    (void)features;
    memcpy(gradient, given->slopes + first * given->width, sizeof(float) * count * given->width);
}

/* Compare a pass over a batch, with this many threads. */
static void check_batch(Network *net, Plain *plain, Layer *layers, int num_layers, int side, int batch, int threads, double errors[2]) {
    const long width = net->hidden.width, inputs = net->hidden.features, image = 3L * side * side;
    uint8_t *observations = malloc(image * (batch + 1));
    int64_t *rows = malloc(sizeof(int64_t) * batch);
    float *slopes = malloc(sizeof(float) * batch * width), *out = malloc(sizeof(float) * batch * width);
    float *row_inputs = malloc(sizeof(float) * batch * inputs), *row_slopes = malloc(sizeof(float) * batch * width);
    double *features = malloc(sizeof(double) * batch * width), seconds[3];
    Gradient gradients[64];
    for (long i = 0; i < image * (batch + 1); i++) observations[i] = (uint8_t)any();
    for (int b = 0; b < batch; b++) rows[b] = (b * 7 + 3) % (batch + 1);
    for (long i = 0; i < batch * width; i++) slopes[i] = (float)between(-1, 1);
    for (int i = 0; i < num_layers; i++) {
        Layer *layer = layers + i;
        memset(layer->weights_gradient, 0, sizeof(double) * layer->out * patch_of(layer));
        memset(layer->bias_gradient, 0, sizeof(double) * layer->out);
        gradients[i] = (Gradient){malloc(sizeof(float) * layer->out * patch_of(layer)), malloc(sizeof(float) * layer->out)};
    }
    for (int b = 0; b < batch; b++) {
        const Image observation = image_of(side, side, 3);
        for (long i = 0; i < image; i++) observation.at[i] = observations[rows[b] * image + i] / 255.0;
        memcpy(features + b * width, plain(layers, num_layers, observation, slopes + b * width).at, sizeof(double) * width);
    }
    network_forward(net, observations, rows, batch, 0, threads, out); /* nothing is saved */
    errors[0] = fmax(errors[0], error_of(out, features, batch * width));
    network_forward(net, observations, rows, batch, 1, threads, out);
    network_backward(net, observations, rows, batch, threads, out, slopes, cleared(gradients, layers, num_layers), NULL, NULL);
    compare(out, features, batch * width, gradients, layers, num_layers, errors);
    network_train(net, observations, rows, batch, threads, losses, &(Given){slopes, width}, cleared(gradients, layers, num_layers), out,
                  row_inputs, row_slopes, seconds);
    network_products(net, threads, row_inputs, row_slopes, batch, 0, 32, gradients[num_layers - 1].weights);
    network_products(net, threads, row_inputs, row_slopes, batch, 32, (int)inputs, gradients[num_layers - 1].weights);
    compare(out, features, batch * width, gradients, layers, num_layers, errors);
}

static int check(const char *name, Network *net, Plain *plain, Layer *layers, int num_layers, int side) {
    const float *weights[64], *biases[64];
    const int batches[] = FEW_SAMPLES;
    double least[2] = {INFINITY, INFINITY}, most[2] = {0, 0};
    if (!net) return printf("%s: is not computed\n", name), 0;
    for (int i = 0; i < num_layers; i++) fill(layers + i), weights[i] = layers[i].weights, biases[i] = layers[i].bias;
    network_pack(net, weights, biases);
    for (int n = 0; n < 3; n++) {
        double errors[2] = {0, 0};
        check_batch(net, plain, layers, num_layers, side, batches[n], n + 1, errors);
        for (int i = 0; i < 2; i++) least[i] = fmin(least[i], errors[i]), most[i] = fmax(most[i], errors[i]);
    }
    network_destroy(net);
    printf("%s: features differ by %.1e to %.1e, gradients by %.1e to %.1e\n", name, least[0], most[0], least[1], most[1]);
    return least[0] < ERROR && least[1] < ERROR && most[0] < ERROR_OF_DECISIONS && most[1] < ERROR_OF_DECISIONS;
}

static int check_impala(int side, int stages, const int *channels, int width) {
    Layer layers[64];
    int in = 3;
    for (int i = 0; i < 5 * stages; i++, in = channels[(i - 1) / 5]) layers[i] = (Layer){in, channels[i / 5], 3, 1, 1, 0, 0, 0, 0};
    layers[5 * stages] = (Layer){in * (side >> stages) * (side >> stages), width, 1, 1, 0, 0, 0, 0, 0};
    return check("impala", impala_create(side, side, stages, channels, width), plain_impala, layers, 5 * stages + 1, side);
}

static int check_nature(void) {
    Layer layers[] = {{3, 32, 8, 4, 0, 0, 0, 0, 0}, {32, 64, 4, 2, 0, 0, 0, 0, 0}, {64, 64, 3, 1, 0, 0, 0, 0, 0},
                      {1024, 32, 1, 1, 0, 0, 0, 0, 0}};
    return check("nature", nature_create(64, 64, 3, (const int[]){32, 64, 64}, 32), plain_nature, layers, 4, 64);
}

int main(void) {
    const int narrow = check_impala(16, 2, (const int[]){16, 32}, 32), wide = check_impala(8, 1, (const int[]){48}, 64);
    return !(check_nature() && narrow && wide);
}
