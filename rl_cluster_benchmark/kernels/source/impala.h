/* The IMPALA-CNN: stages of a convolution, max-pooling that halves the image, and two residual blocks of two convolutions. */
#define MAX_STAGES 8
#define STAGE_CONVS 5
#define RGB 3
#define IMAGE_FLOATS (24 << 10) /* of the images of the samples that go through a stage together */
#define RUN (3 * RGB) /* three neighbouring pixels of an observation */

typedef struct {
    int in, out, height, width;         /* channels; of its input and output */
    float *forward, *backward, *bias;   /* weights at the points of Winograd's transform; the first layer's are [3][RUN][out] */
} Conv;

typedef struct {
    int height, width, channels;        /* after pooling */
    int samples;                        /* that go through it together */
    long size;                          /* of a framed image */
    Conv convs[STAGE_CONVS];
    long relu[4], output, winners;      /* where a sample's saved images stand: inputs of convs 1 to 4, the stage's output */
} Stage;

typedef struct {
    int height, width, num_stages, most_channels;
    Stage stages[MAX_STAGES];
} Impala;

/* The memory of a thread: images of CHUNK samples, and gradients of a block. */
typedef struct {
    float *pixels, *lines;              /* a framed observation; lines of the first convolution */
    float *sum[MAX_STAGES][2], *unpooled[MAX_STAGES], *grad[MAX_STAGES], *inner_grad[MAX_STAGES];
    float *sums[MAX_STAGES * STAGE_CONVS], *bias[MAX_STAGES * STAGE_CONVS];
    Points points;
} ImpalaWork;

/* ---- The first convolution -------------------------------------------------------------------------------------------------- */

static void scale_pixels(const uint8_t *from, int height, int width, float *pixels) {
    for (int y = 0; y < height; y++, from += width * RGB)
        for (int i = 0; i < width * RGB; i++) pixels[at(width, RGB, y, 0) + i] = from[i] * (1 / 255.f);
}

INLINE void first_line_of(const int out, const int vectors, const float *pixels, int width, const float *weights, const float *bias, float *line) {
    for (int o = 0; o < out; o += vectors * VL)
        for (int x = 0; x < width; x += 8) {
            vec sums[MOST_SUMS];
            UNROLL for (int i = 0; i < 8 * vectors; i++) sums[i] = load(bias + o + i % vectors * VL);
            for (int dy = 0; dy < 3; dy++)
                multiply(8, vectors, sums, pixels + (dy * (width + 2L) + x) * RGB, RGB, 1, weights + dy * RUN * out + o, out, RUN);
            store_sums(8, vectors, sums, line + (long)x * out + o, out);
        }
}

/* Compute a line of the convolution, from the three lines of the framed observation that begin at `pixels`. */
static void first_line(int out, const float *pixels, int width, const float *weights, const float *bias, float *line) {
    if (out == 16) first_line_of(16, 1, pixels, width, weights, bias, line);
    else if (out == 32) first_line_of(32, 1, pixels, width, weights, bias, line);
    else first_line_of(out, 1, pixels, width, weights, bias, line);
}

/* Add to the gradient [3][RUN][out] of the weights and to that of the bias from the gradient of such a line. */
static void first_line_gradient(int out, const float *pixels, int width, const float *slopes, float *weights, float *bias) {
    for (int o = 0; o < out; o += VL) {
        vec total = load(bias + o);
        for (int x = 0; x < width; x++) total += load(slopes + (long)x * out + o);
        store(bias + o, total);
        for (int dy = 0; dy < 3; dy++) {
            float *to = weights + dy * RUN * out + o;
            vec sums[MOST_SUMS];
            load_sums(RUN, 1, sums, to, out);
            multiply(RUN, 1, sums, pixels + dy * (width + 2L) * RGB, 1, RGB, slopes + o, out, width);
            store_sums(RUN, 1, sums, to, out);
        }
    }
}

/* ---- Pooling ------------------------------------------------------------------------------------------------------------------ */

/* Max-pool three lines, 3 x 3 with stride 2, to one of `width` pixels, where `above` is NULL in the first line: write it, its
 * ReLU, and each window's winner, a place from 0 to 8: those of four windows side by side in the four bytes of a word. The
 * first of equals wins, as in torch. */
static void pool_line(const float *above, const float *middle, const float *below, int width, int channels, float *out, float *out_relu,
                      int32_t *winners) {
    const float *lines[3] = {above, middle, below};
    for (int x = 0; x < width; x += 4)
        for (int c = 0; c < channels; c += VL) {
            lanes word = {0};
            UNROLL for (int i = 0; i < 4; i++) {
                vec best = load(middle + 2L * (x + i) * channels + c);
                lanes winner = (lanes){0} + 4;
                UNROLL for (int j = 0; j < 8; j++) { /* from the middle towards the first, then towards the last */
                    const int place = j < 4 ? 3 - j : j + 1;
                    if (!lines[place / 3] || (x + i == 0 && place % 3 == 0)) continue;
                    const vec value = load(lines[place / 3] + (2L * (x + i) + place % 3 - 1) * channels + c);
                    const lanes wins = j < 4 ? value >= best : value > best;
                    best = choose(wins, value, best), winner = (wins & place) | (~wins & winner);
                }
                const long to = (long)(x + i) * channels + c;
                store(out + to, best), store(out_relu + to, relu(best)), word |= winner << 8 * i;
            }
            *(lanes *)(winners + (long)x / 4 * channels + c) = word;
        }
}

/* The gradient of a window's winner where this is the place, else zero; `i` is the byte of the word. */
INLINE vec won(vec grad, lanes word, int i, int place) {
    return (vec)((lanes)grad & ((word & (int32_t)(255u << 8 * i)) == place << 8 * i));
}

/* The gradients of two lines before pooling, from those of the line at `grad` and of the next; after the last pixel and line
 * stand zeros. A line of winners is one word longer than the image. */
static void unpool_lines(const float *grad, long grad_line, const int32_t *winners, int width, int channels, float *first, float *second) {
    const long winner_line = (width / 4 + 1L) * channels;
    for (int x = 0; x < width; x += 4)
        for (int c = 0; c < channels; c += VL) {
            const int32_t *from = winners + (long)x / 4 * channels + c;
            const lanes word = *(const lanes *)from, next = *(const lanes *)(from + channels);
            const lanes word_below = *(const lanes *)(from + winner_line), next_below = *(const lanes *)(from + winner_line + channels);
            UNROLL for (int i = 0; i < 4; i++) {
                const float *here = grad + (long)(x + i) * channels + c;
                const vec left = load(here), right = load(here + channels), below = load(here + grad_line);
                const vec below_right = load(here + grad_line + channels);
                const lanes word_right = i == 3 ? next : word, word_below_right = i == 3 ? next_below : word_below;
                const int r = (i + 1) % 4;
                const long to = 2L * (x + i) * channels + c;
                store(first + to, won(left, word, i, 4));
                store(first + to + channels, won(left, word, i, 5) + won(right, word_right, r, 3));
                store(second + to, won(left, word, i, 7) + won(below, word_below, i, 1));
                store(second + to + channels, won(left, word, i, 8) + won(right, word_right, r, 6) + won(below, word_below, i, 2) +
                                                  won(below_right, word_below_right, r, 0));
            }
        }
}

/* ---- Stages ------------------------------------------------------------------------------------------------------------------- */

/* Run samples through a stage, from `input`, the output of the stage before. */
static void run_stage(const Impala *impala, int s, ImpalaWork *work, Observations from, long start, int count, Images input,
                      float *saved, long step) {
    const Stage *stage = &impala->stages[s];
    const Conv *conv = stage->convs;
    const int c = stage->channels, h = stage->height, w = stage->width;
    const long line = 2L * w * c, framed = (2L * w + 2) * c, unpooled = framed_size(2 * h, 2 * w, c);
    const Images sum[2] = {{work->sum[s][0], stage->size}, {work->sum[s][1], stage->size}}, output = {saved + stage->output, step};
    Images relu[4];
    for (int i = 0; i < 4; i++) relu[i] = (Images){saved + stage->relu[i], step};
    if (s) convolve_plain(conv->in, c, 2 * h, 2 * w, count, input, conv->forward, conv->bias, (Ends){{work->unpooled[s], unpooled}}, work->points);
    for (int b = 0; b < count; b++) {
        if (!s) scale_pixels(observation(from, start + b), 2 * h, 2 * w, work->pixels);
        int32_t *winners = (int32_t *)(saved + b * step + stage->winners);
        for (int y = 0; y < h; y++) {
            float *lines[3]; /* above, middle, below */
            for (int i = 0; i < 3; i++) {
                lines[i] = s ? work->unpooled[s] + b * unpooled + (2L * y + i) * framed + c : work->lines + (2 * y + i) % 3 * line;
                if (!s && i) first_line(c, work->pixels + (2L * y + i - 1) * (2 * w + 2) * RGB, 2 * w, conv->forward, conv->bias, lines[i]);
            }
            const long to = at(w, c, y, 0);
            pool_line(y ? lines[0] : NULL, lines[1], lines[2], w, c, sum[0].first + b * stage->size + to,
                      relu[0].first + b * step + to, winners + y * (w / 4 + 1L) * c);
        }
    }
    convolve_relu(c, c, h, w, count, relu[0], conv[1].forward, conv[1].bias, (Ends){relu[1]}, work->points);
    convolve_residual_relu(c, c, h, w, count, relu[1], conv[2].forward, conv[2].bias, (Ends){sum[1], .relu = relu[2], .add = sum[0]}, work->points);
    convolve_relu(c, c, h, w, count, relu[2], conv[3].forward, conv[3].bias, (Ends){relu[3]}, work->points);
    convolve_residual(c, c, h, w, count, relu[3], conv[4].forward, conv[4].bias, (Ends){output, .add = sum[1]}, work->points);
}

static void impala_run(const Network *net, void *own, Observations from, long start, int count, float *saved, float *features) {
    const Impala *impala = net->layers;
    const long step = net->saved_size;
    const Stage *stage = impala->stages;
    for (int s = 0; s < impala->num_stages; s++, stage++)
        for (int b = 0; b < count; b += stage->samples)
            run_stage(impala, s, own, from, start + b, smaller(stage->samples, count - b),
                      (Images){s ? saved + b * step + stage[-1].output : NULL, step}, saved + b * step, step);
    stage--;
    const int line = stage->width * stage->channels;
    for (int b = 0; b < count; b++)
        for (int y = 0; y < stage->height; y++, features += line)
            for (int i = 0; i < line; i += VL)
                store(features + i, relu(load(saved + b * step + stage->output + at(stage->width, stage->channels, y, 0) + i)));
}

/* Take samples back through a stage: from the gradient at its output to that at its input, `grad_input`, which the first has not. */
static void return_stage(const Impala *impala, int s, ImpalaWork *work, Observations from, long start, int count, float *saved, long step,
                         Images grad, Images grad_input) {
    const Stage *stage = &impala->stages[s];
    const Conv *conv = stage->convs;
    const int c = stage->channels, h = stage->height, w = stage->width;
    float **sums = work->sums + s * STAGE_CONVS, **bias = work->bias + s * STAGE_CONVS;
    const Images other = {work->inner_grad[s], stage->size};
    for (int i = 4; i > 0; i -= 2) { /* the residual blocks, last first */
        const Images inner = {saved + stage->relu[i - 1], step}, outer = {saved + stage->relu[i - 2], step};
        weight_gradient(c, c, h, w, count, inner, grad, sums[i], bias[i], work->points);
        convolve_mask(c, c, h, w, count, grad, conv[i].backward, NULL, (Ends){other, .mask = inner}, work->points);
        weight_gradient(c, c, h, w, count, outer, other, sums[i - 1], bias[i - 1], work->points);
        convolve_mask_add(c, c, h, w, count, other, conv[i - 1].backward, NULL, (Ends){grad, .add = grad, .mask = outer}, work->points);
    }
    const long framed = (2L * w + 2) * c, size = framed_size(2 * h, 2 * w, c);
    for (int b = 0; b < count; b++) {
        const int32_t *winners = (const int32_t *)(saved + b * step + stage->winners);
        if (!s) scale_pixels(observation(from, start + b), 2 * h, 2 * w, work->pixels);
        for (int y = 0; y < h; y++) {
            float *first = s ? work->unpooled[s] + b * size + at(2 * w, c, 2 * y, 0) : work->lines, *second = first + (s ? framed : 2L * w * c);
            unpool_lines(grad.first + b * stage->size + at(w, c, y, 0), (w + 2L) * c, winners + y * (w / 4 + 1L) * c, w, c, first, second);
            if (s) continue;
            first_line_gradient(c, work->pixels + 2L * y * (2 * w + 2) * RGB, 2 * w, first, sums[0], bias[0]);
            first_line_gradient(c, work->pixels + (2L * y + 1) * (2 * w + 2) * RGB, 2 * w, second, sums[0], bias[0]);
        }
    }
    if (!s) return;
    const Images slopes = {work->unpooled[s], size}, input = {saved + stage[-1].output, step};
    weight_gradient(conv->in, c, 2 * h, 2 * w, count, input, slopes, sums[0], bias[0], work->points);
    convolve_plain(c, conv->in, 2 * h, 2 * w, count, slopes, conv->backward, NULL, (Ends){grad_input}, work->points);
}

static void impala_back(const Network *net, void *own, Observations from, long start, int count, const float *saved, const float *grad_features) {
    const Impala *impala = net->layers;
    ImpalaWork *work = own;
    const Stage *stage = &impala->stages[impala->num_stages - 1];
    const long step = net->saved_size, line = (long)stage->width * stage->channels;
    for (int b = 0; b < count; b++)
        for (int y = 0; y < stage->height; y++, grad_features += line)
            memcpy(work->grad[impala->num_stages - 1] + b * stage->size + at(stage->width, stage->channels, y, 0), grad_features, sizeof(float) * line);
    for (int s = impala->num_stages - 1; s >= 0; s--, stage--)
        for (int b = 0; b < count; b += stage->samples) {
            const Images grad = {work->grad[s] + b * stage->size, stage->size};
            const Images before = s ? (Images){work->grad[s - 1] + b * stage[-1].size, stage[-1].size} : (Images){0};
            return_stage(impala, s, work, from, start + b, smaller(stage->samples, count - b), (float *)saved + b * step, step, grad, before);
        }
}

static void impala_add(const Network *net, void *own, const Gradient *gradients) {
    const Impala *impala = net->layers;
    ImpalaWork *work = own;
    for (int i = 0; i < net->num_convs; i++) {
        const Conv *conv = &impala->stages[i / STAGE_CONVS].convs[i % STAGE_CONVS];
        for (int o = 0; o < conv->out; o += VL) add(gradients[i].bias + o, take(work->bias[i] + o));
        if (i) end_weight_gradient(conv->in, conv->out, work->sums[i], gradients[i].weights);
        else
            for (int k = 0; k < 3 * RUN; k++)
                for (int o = 0; o < conv->out; o++)
                    gradients->weights[o * 3 * RUN + k] += work->sums[0][k * conv->out + o], work->sums[0][k * conv->out + o] = 0;
    }
}

static void impala_pack(Network *net, const float *const *weights, const float *const *biases) {
    Impala *impala = net->layers;
    for (int i = 0; i < net->num_convs; i++) {
        const Conv *conv = &impala->stages[i / STAGE_CONVS].convs[i % STAGE_CONVS];
        memcpy(conv->bias, biases[i], sizeof(float) * conv->out);
        if (!i) swap_channels(weights[i], 3 * RUN, conv->out, 1, conv->forward);
        else {
            swap_channels(weights[i], conv->in, conv->out, 9, conv->backward);
            weights_to_points(conv->backward, conv->in, conv->out, 0, conv->forward);
            weights_to_points(weights[i], conv->out, conv->in, 1, conv->backward);
        }
    }
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------------- */

static void impala_destroy_own(void *own) {
    ImpalaWork *work = own;
    for (int s = 0; s < MAX_STAGES; s++) {
        float *images[] = {work->sum[s][0], work->sum[s][1], work->unpooled[s], work->grad[s], work->inner_grad[s]};
        for (int i = 0; i < 5; i++) free(images[i]);
    }
    for (int i = 0; i < MAX_STAGES * STAGE_CONVS; i++) free(work->sums[i]), free(work->bias[i]);
    free(work->pixels), free(work->lines), free(work->points.inputs), free(work->points.outputs), free(work);
}

static void *impala_make_own(const Network *net) {
    const Impala *impala = net->layers;
    ImpalaWork *work = calloc(1, sizeof *work);
    if (!work) return NULL;
    const int first = impala->stages->channels;
    work->pixels = allocate(framed_size(impala->height, impala->width, RGB)), work->lines = allocate(3L * impala->width * first);
    work->points.inputs = allocate(POINTS * (long)POINT_SIZE(impala->most_channels, MANY_TILES));
    work->points.outputs = allocate(POINTS * (long)POINT_SIZE(impala->most_channels, MANY_TILES));
    int complete = work->pixels && work->lines && work->points.inputs && work->points.outputs;
    for (int s = 0; s < impala->num_stages; s++) {
        const Stage *stage = &impala->stages[s];
        float **images[] = {&work->sum[s][0], &work->sum[s][1], &work->grad[s], &work->inner_grad[s]};
        for (int i = 0; i < 4; i++) complete = complete && (*images[i] = allocate(CHUNK * stage->size));
        if (s) complete = complete && (work->unpooled[s] = allocate(stage->samples * framed_size(2 * stage->height, 2 * stage->width, stage->channels)));
        for (int i = 0; i < STAGE_CONVS; i++) {
            const Conv *conv = &stage->convs[i];
            float **sums = &work->sums[s * STAGE_CONVS + i], **bias = &work->bias[s * STAGE_CONVS + i];
            complete = complete && (*sums = allocate(conv->in == RGB ? 3L * RUN * conv->out : (long)POINTS * conv->in * conv->out));
            complete = complete && (*bias = allocate(conv->out));
        }
    }
    if (!complete) impala_destroy_own(work);
    return complete ? work : NULL;
}

static void impala_destroy(Network *net) {
    Impala *impala = net->layers;
    for (int i = 0; i < net->num_convs; i++) {
        Conv *conv = &impala->stages[i / STAGE_CONVS].convs[i % STAGE_CONVS];
        free(conv->forward), free(conv->backward), free(conv->bias);
    }
    free(impala);
}

static const Architecture IMPALA = {impala_make_own, impala_destroy_own, impala_run, impala_back, impala_add, impala_pack, impala_destroy};

/* Returns NULL if this code does not compute networks of this shape, or there is no memory. */
Network *impala_create(int height, int width, int num_stages, const int *channels, int hidden) {
    if (num_stages < 1 || num_stages > MAX_STAGES || height < 8 || width < 8 || height > 256 || width > 256) return NULL;
    for (int s = 0; s < num_stages; s++)
        if (channels[s] < 16 || channels[s] % 16 || channels[s] > 256 || height % (8 << s) || width % (8 << s)) return NULL;
    const long features = (long)(height >> num_stages) * (width >> num_stages) * channels[num_stages - 1];
    Network *net = make_network(&IMPALA, (long)height * width * RGB, num_stages * STAGE_CONVS, features, hidden);
    Impala *impala = net ? net->layers = calloc(1, sizeof *impala) : NULL;
    if (!impala) return net ? network_destroy(net), NULL : NULL;
    *impala = (Impala){height, width, num_stages, 16};
    int in = RGB, complete = 1;
    for (int s = 0; s < num_stages; s++, height /= 2, width /= 2) {
        Stage *stage = &impala->stages[s];
        const int out = channels[s];
        if (out > impala->most_channels) impala->most_channels = out;
        *stage = (Stage){height / 2, width / 2, out, .size = framed_size(height / 2, width / 2, out)};
        stage->samples = stage->size > IMAGE_FLOATS ? 1 : smaller(CHUNK, IMAGE_FLOATS / (int)stage->size);
        for (int i = 0; i < 4; i++) stage->relu[i] = net->saved_size, net->saved_size += stage->size;
        stage->output = net->saved_size, net->saved_size += stage->size;
        stage->winners = net->saved_size; /* with one word and one line more than the image */
        net->saved_size += (height / 2 + 1L) * (width / 8 + 1L) * out;
        for (int i = 0; i < STAGE_CONVS; i++, in = out) {
            Conv *conv = &stage->convs[i];
            *conv = (Conv){in, out, i ? height / 2 : height, i ? width / 2 : width};
            conv->forward = allocate((in == RGB ? 3L * RUN : (long)POINTS * in) * out), conv->bias = allocate(out);
            conv->backward = in == RGB ? NULL : allocate((long)POINTS * in * out);
            complete = complete && conv->forward && conv->bias && (in == RGB || conv->backward);
        }
    }
    return complete ? net : (network_destroy(net), NULL);
}
