/* The Nature-CNN for observations of 64 x 64 pixels: three convolutions, each with a ReLU.
 *
 * They give 15 x 15 x 32, 6 x 6 x 64 and 4 x 4 x 64; of the 15 x 15 the last row and column are never read, nor computed.
 *
 * Convolution 2, and the gradient of its input, are sums of products [pixels][DEPTH] x [DEPTH][channels], one for each part of
 * the kernel, whose weights stay in the first-level cache while the lines of a chunk go through it: forward, a part reads
 * pixels that lie a stride apart; backward it adds to them. So no zeros of a frame are multiplied.
 *
 * Convolution 3 is one tile of Winograd's: its input is a tile of 6 x 6 pixels, or an image of 4 x 4 with its frame. The
 * gradient of the input is the transpose of the same.
 */
#define SIDE 64  /* of an observation */
#define SIDE1 14 /* of the images that the convolutions make, and their channels */
#define SIDE2 6
#define SIDE3 4
#define OUT1 32
#define OUT2 64
#define OUT3 64
#define SIZE1 (SIDE1 * SIDE1 * OUT1)
#define SIZE2 (SIDE2 * SIDE2 * OUT2)
#define SIZE3 (SIDE3 * SIDE3 * OUT3)
#define LINE (SIDE * RGB)
#define LINE3 (SIDE3 * OUT3)
#define RUN1 (8 * RGB)    /* elements of a line that a kernel of convolution 1 sees */
#define PATCH1 (8 * RUN1) /* weights of a channel */
#define PATCH2 (4 * 4 * OUT1)
#define PATCH3 (POINTS * OUT2) /* at the points of the transform */
#define DEPTH 64
#define COLUMNS 32 /* weights of a channel whose gradients are computed together */

/* Rows and vectors of the sums that are kept in registers, of which AVX-512 has 32 and others may have 16. */
#define PIXELS1 (VL == 16 ? 7 : 14)
#define VECTORS1 (VL == 16 ? 2 : 1)
#define SLOPES (VL == 16 ? 8 : 6)

static const int OUTS[3] = {OUT1, OUT2, OUT3}, PATCHES[3] = {PATCH1, PATCH2, PATCH3};

typedef struct {
    float *forward[3];  /* [weights of a channel][out]; the third are [POINTS][in][out] */
    float *backward[3]; /* [4 * 4 or POINTS][out][in]; no gradient goes back to the observation */
    float *bias[3];
} Nature;

/* The memory of a thread: an observation, gradients of images of a chunk, and gradients of a block. */
typedef struct {
    float *pixels, *grad[2], *third; /* `third` has a frame */
    float *inputs, *slopes;          /* what second_gradient needs */
    float *sums[3], *bias[3];        /* [PATCH1][OUT1]; [OUT2][PATCH2], with rows to spare; [POINTS][OUT3][OUT2] */
    Points points;
} NatureWork;

/* ---- Convolution 1 --------------------------------------------------------------------------------------------------------- */

static void read_pixels(const uint8_t *from, float *pixels) {
    for (int i = 0; i < SIDE * LINE; i++) pixels[i] = from[i] * (1 / 255.f);
}

static void first_convolution(const float *pixels, const float *weights, const float *bias, float *out) {
    for (int y = 0; y < SIDE1; y++)
        for (int x = 0; x < SIDE1; x += PIXELS1, out += PIXELS1 * OUT1)
            for (int o = 0; o < OUT1; o += VECTORS1 * VL) {
                const float *from = pixels + 4 * (y * LINE + x * RGB);
                vec sums[MOST_SUMS];
                load_sums(PIXELS1, VECTORS1, sums, bias + o, 0);
                for (int dy = 0; dy < 8; dy++)
                    multiply(PIXELS1, VECTORS1, sums, from + dy * LINE, 4 * RGB, 1, weights + dy * RUN1 * OUT1 + o, OUT1, RUN1);
                UNROLL for (int i = 0; i < PIXELS1 * VECTORS1; i++) sums[i] = relu(sums[i]);
                store_sums(PIXELS1, VECTORS1, sums, out + o, OUT1);
            }
}

/* Add to the gradient weights[8][RUN1][OUT1], from half of the lines at a time, which fit into the first-level cache. */
static void first_gradient(const float *pixels, const float *slopes, float *weights) {
    const int rows = VL == 16 ? 8 : 6;
    for (int first = 0; first < SIDE1; first += SIDE1 / 2)
        for (int dy = 0; dy < 8; dy++)
            for (int i = 0; i < RUN1; i += rows)
                for (int o = 0; o < OUT1; o += 2 * VL) {
                    float *to = weights + (dy * RUN1 + i) * OUT1 + o;
                    vec sums[MOST_SUMS];
                    load_sums(rows, 2, sums, to, OUT1);
                    for (int y = first; y < first + SIDE1 / 2; y++)
                        multiply(rows, 2, sums, pixels + (4 * y + dy) * LINE + i, 1, 4 * RGB, slopes + y * SIDE1 * OUT1 + o, OUT1,
                                 SIDE1);
                    store_sums(rows, 2, sums, to, OUT1);
                }
}

/* ---- Convolution 2 --------------------------------------------------------------------------------------------------------- */

/* Square images of several samples, or some of their pixels: steps lead from one sample, line and pixel to the next. */
typedef struct {
    float *first;
    long step, line, pixel;
} Grid;

/* The pixels that place y, x of the kernel sees. */
INLINE Grid seen(float *images, long step, int y, int x) {
    return (Grid){images + (y * SIDE1 + x) * OUT1, step, 2 * SIDE1 * OUT1, 2 * OUT1};
}

INLINE Grid made(float *images, long step) { return (Grid){images, step, SIDE2 * OUT2, OUT2}; }

/* to[SIDE2][SIDE2][channels] += from[SIDE2][SIDE2][DEPTH] x weights[DEPTH][channels] */
INLINE void add_products(const int channels, int samples, Grid from, const float *weights, Grid to) {
    for (int b = 0; b < samples; b++)
        for (int y = 0; y < SIDE2; y++)
            for (int c = 0; c < channels; c += 2 * VL) {
                const float *left = from.first + b * from.step + y * from.line;
                float *out = to.first + b * to.step + y * to.line + c;
                vec sums[MOST_SUMS];
                load_sums(SIDE2, 2, sums, out, to.pixel);
                multiply(SIDE2, 2, sums, left, from.pixel, 1, weights + c, channels, DEPTH);
                store_sums(SIDE2, 2, sums, out, to.pixel);
            }
}

/* Set slopes to zero where the output is not positive, and add them to the gradient of the bias. */
static void end_slopes(const float *outputs, int channels, int pixels, float *slopes, float *bias) {
    for (int c = 0; c < channels; c += VL) {
        vec total = load(bias + c);
        for (int i = c; i < pixels * channels; i += channels) {
            const vec slope = where_positive(load(outputs + i), load(slopes + i));
            store(slopes + i, slope), total += slope;
        }
        store(bias + c, total);
    }
}

/* Add to the gradient weights[OUT2][4][4][OUT1], from the inputs and the slopes of all samples. Both are copied, in the order in
 * which they are read. OUT2 may be no multiple of SLOPES: what is copied beyond a pixel's slopes counts for nothing, its sums
 * stand after the weights. */
static void second_gradient(int samples, const float *images, long step, const float *slopes, float *weights, NatureWork *work) {
    const int pixels = samples * SIDE2 * SIDE2, run = 4 * OUT1;
    for (int o = 0; o < OUT2; o += SLOPES)
        for (int p = 0; p < pixels; p++) /* [pixels][SLOPES] */
            memcpy(work->slopes + o * pixels + p * SLOPES, slopes + p * OUT2 + o, sizeof(float) * SLOPES);
    for (int k = 0; k < PATCH2; k += COLUMNS) {
        float *to = work->inputs; /* [pixels][COLUMNS] */
        for (int b = 0; b < samples; b++)
            for (int p = 0; p < SIDE2 * SIDE2; p++, to += COLUMNS) {
                const int y = 2 * (p / SIDE2) + k / run, x = 2 * (p % SIDE2);
                memcpy(to, images + b * step + (y * SIDE1 + x) * OUT1 + k % run, sizeof(float) * COLUMNS);
            }
        for (int o = 0; o < OUT2; o += SLOPES)
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                float *sums_to = weights + o * PATCH2 + k + c;
                vec sums[MOST_SUMS];
                load_sums(SLOPES, 2, sums, sums_to, PATCH2);
                multiply(SLOPES, 2, sums, work->slopes + o * pixels, 1, SLOPES, work->inputs + c, COLUMNS, pixels);
                store_sums(SLOPES, 2, sums, sums_to, PATCH2);
            }
    }
}

/* ---- Convolution 3 --------------------------------------------------------------------------------------------------------- */

/* The transpose of transform_pixels. */
INLINE void transform_to_pixels(const vec t[6], vec d[6]) {
    const vec s = t[1] + t[2], m = t[1] - t[2], s2 = t[3] + t[4], m2 = 2 * (t[3] - t[4]);
    d[0] = 4 * t[0], d[1] = 4 * (t[5] - m) - m2, d[2] = -5 * t[0] - 4 * s - s2;
    d[3] = m + m2 - 5 * t[5], d[4] = t[0] + s + s2, d[5] = t[5];
}

/* Write the gradient of the inputs from the slopes, of at most TILES samples. */
static void third_back(int samples, Images slopes, const float *weights, float *grad, Points room) {
    slopes_to_points(OUT3, slopes, SIDE3, SIDE3, 0, samples, room.inputs, POINT_SIZE(OUT3, TILES));
    multiply_points(OUT3, OUT2, room.inputs, weights, room.outputs, samples);
    for (int b = 0; b < samples; b++, grad += SIZE2)
        for (int c = 0; c < OUT2; c += VL) {
            const float *from = room.outputs + b * OUT2 + c;
            SQUARE(transform_to_pixels, 6, 6, load(from + (y * 6 + x) * POINT_SIZE(OUT2, TILES)),
                   store(grad + (y * 6 + x) * OUT2 + c, made[x]))
        }
}

/* ---- Chunks of samples ----------------------------------------------------------------------------------------------------- */

static void nature_run(const Network *net, void *own, Observations from, long start, int count, float *saved, float *features) {
    const Nature *nature = net->layers;
    NatureWork *work = own;
    const long step = net->saved_size;
    float *second = saved + SIZE1;
    for (int b = 0; b < count; b++) {
        read_pixels(observation(from, start + b), work->pixels);
        first_convolution(work->pixels, nature->forward[0], nature->bias[0], saved + b * step);
        for (int i = 0; i < SIZE2; i += OUT2) memcpy(second + b * step + i, nature->bias[1], sizeof(float) * OUT2);
    }
    for (int i = 0; i < 8; i++) /* two neighbouring places of the kernel at a time */
        add_products(OUT2, count, seen(saved, step, i / 2, i % 2 * 2), nature->forward[1] + i * DEPTH * OUT2, made(second, step));
    for (int b = 0; b < count; b++)
        for (float *to = second + b * step; to < second + b * step + SIZE2; to += VL) store(to, relu(load(to)));
    convolve_relu(OUT2, OUT3, SIDE3, SIDE3, count, (Images){second, step}, nature->forward[2], nature->bias[2],
                  (Ends){{work->third, SIZE2}}, work->points);
    for (int i = 0; i < count * SIDE3; i++)
        memcpy(features + i * LINE3, work->third + i / SIDE3 * SIZE2 + at(SIDE3, OUT3, i % SIDE3, 0), sizeof(float) * LINE3);
}

static void nature_back(const Network *net, void *own, Observations from, long start, int count, const float *saved,
                        const float *grad_features) {
    const Nature *nature = net->layers;
    NatureWork *work = own;
    const long step = net->saved_size;
    const Images second = {(float *)saved + SIZE1, step}, third = {work->third, SIZE2};
    float **grad = work->grad;
    for (int i = 0; i < count * SIDE3; i++)
        memcpy(third.first + i / SIDE3 * SIZE2 + at(SIDE3, OUT3, i % SIDE3, 0), grad_features + i * LINE3, sizeof(float) * LINE3);
    weight_gradient(OUT2, OUT3, SIDE3, SIDE3, count, second, third, work->sums[2], work->bias[2], work->points);
    for (int b = 0; b < count; b += TILES)
        third_back(smaller(TILES, count - b), (Images){third.first + b * SIZE2, SIZE2}, nature->backward[2], grad[1] + b * SIZE2,
                   work->points);
    for (int b = 0; b < count; b++) end_slopes(second.first + b * step, OUT2, SIDE2 * SIDE2, grad[1] + b * SIZE2, work->bias[1]);
    second_gradient(count, saved, step, grad[1], work->sums[1], work);
    memset(grad[0], 0, sizeof(float) * count * SIZE1);
    for (int i = 0; i < 16; i++)
        add_products(OUT1, count, made(grad[1], SIZE2), nature->backward[1] + i * OUT2 * OUT1,
                     seen(grad[0], SIZE1, i / 4, i % 4));
    for (int b = 0; b < count; b++) {
        end_slopes(saved + b * step, OUT1, SIDE1 * SIDE1, grad[0] + b * SIZE1, work->bias[0]);
        read_pixels(observation(from, start + b), work->pixels);
        first_gradient(work->pixels, grad[0] + b * SIZE1, work->sums[0]);
    }
}

static void nature_add(const Network *net, void *own, const Gradient *gradients) {
    NatureWork *work = own;
    for (int i = 0; i < net->num_convs; i++)
        for (int o = 0; o < OUTS[i]; o += VL) add(gradients[i].bias + o, take(work->bias[i] + o));
    for (int k = 0; k < PATCH1 * OUT1; k++) gradients[0].weights[k] += work->sums[0][k % PATCH1 * OUT1 + k / PATCH1];
    memset(work->sums[0], 0, sizeof(float) * PATCH1 * OUT1);
    for (int k = 0; k < PATCH2 * OUT2; k += VL) add(gradients[1].weights + k, take(work->sums[1] + k));
    end_weight_gradient(OUT2, OUT3, work->sums[2], gradients[2].weights);
}

static void nature_pack(Network *net, const float *const *weights, const float *const *biases) {
    Nature *nature = net->layers;
    for (int i = 0; i < net->num_convs; i++) memcpy(nature->bias[i], biases[i], sizeof(float) * OUTS[i]);
    swap_channels(weights[0], PATCH1, OUT1, 1, nature->forward[0]);
    swap_channels(weights[1], PATCH2, OUT2, 1, nature->forward[1]);
    for (int k = 0; k < 16 * OUT2; k++) /* [out][places] -> [places][out] */
        memcpy(nature->backward[1] + (k % 16 * OUT2 + k / 16) * OUT1, weights[1] + k * OUT1, sizeof(float) * OUT1);
    swap_channels(weights[2], OUT2, OUT3, 9, nature->backward[2]);
    weights_to_points(nature->backward[2], OUT2, OUT3, 0, nature->forward[2]);
    weights_to_points(weights[2], OUT3, OUT2, 0, nature->backward[2]);
}

/* ---- Life ------------------------------------------------------------------------------------------------------------------ */

static void nature_destroy_own(void *own) {
    NatureWork *work = own;
    for (int i = 0; i < 3; i++) free(work->sums[i]), free(work->bias[i]);
    free(work->pixels), free(work->grad[0]), free(work->grad[1]), free(work->third), free(work->inputs), free(work->slopes);
    free(work->points.inputs), free(work->points.outputs), free(work);
}

static void *nature_make_own(const Network *net) {
    NatureWork *work = calloc(1, sizeof *work);
    if (!work) return NULL;
    work->pixels = allocate(SIDE * LINE), work->grad[0] = allocate(CHUNK * SIZE1), work->grad[1] = allocate(CHUNK * SIZE2);
    work->third = allocate(CHUNK * SIZE2);
    work->points.inputs = allocate(POINTS * POINT_SIZE(OUT3, MANY_TILES));
    work->points.outputs = allocate(POINTS * POINT_SIZE(OUT3, MANY_TILES));
    work->inputs = allocate(CHUNK * SIDE2 * SIDE2 * COLUMNS), work->slopes = allocate(CHUNK * SIDE2 * SIDE2 * (OUT2 + SLOPES));
    int complete = work->pixels && work->grad[0] && work->grad[1] && work->third && work->inputs && work->slopes;
    complete = complete && work->points.inputs && work->points.outputs;
    for (int i = 0; i < net->num_convs; i++) {
        work->sums[i] = allocate((OUTS[i] + SLOPES) * PATCHES[i]), work->bias[i] = allocate(OUTS[i]);
        complete = complete && work->sums[i] && work->bias[i];
    }
    if (!complete) nature_destroy_own(work);
    return complete ? work : NULL;
}

static void nature_destroy(Network *net) {
    Nature *nature = net->layers;
    for (int i = 0; i < 3; i++) free(nature->forward[i]), free(nature->backward[i]), free(nature->bias[i]);
    free(nature);
}

static const Architecture NATURE = {nature_make_own, nature_destroy_own, nature_run, nature_back,
                                    nature_add, nature_pack, nature_destroy};

/* Returns NULL if this code does not compute networks of this shape, or there is no memory. */
Network *nature_create(int height, int width, int num_convs, const int *channels, int hidden) {
    if (height != SIDE || width != SIDE || num_convs != 3 || memcmp(channels, OUTS, sizeof OUTS)) return NULL;
    Network *net = make_network(&NATURE, SIDE * LINE, num_convs, SIZE3, hidden);
    Nature *nature = net ? net->layers = calloc(1, sizeof *nature) : NULL;
    if (!nature) return net ? network_destroy(net), NULL : NULL;
    net->saved_size = SIZE1 + SIZE2; /* outputs of convolutions 1 and 2 */
    int complete = 1;
    for (int i = 0; i < num_convs; i++) {
        nature->forward[i] = allocate(OUTS[i] * PATCHES[i]), nature->backward[i] = allocate(i ? OUTS[i] * PATCHES[i] : 0);
        nature->bias[i] = allocate(OUTS[i]);
        complete = complete && nature->forward[i] && nature->backward[i] && nature->bias[i];
    }
    return complete ? net : (network_destroy(net), NULL);
}
