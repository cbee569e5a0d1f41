package solaris.peers;

import ai.onnxruntime.OrtException;
import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonGenerator;
import com.fasterxml.jackson.core.util.ByteArrayBuilder;
import java.io.IOException;
import java.util.Arrays;

/**
 * Impression and user chunks in, ranked ads out: the work of streams/ranker.py for one record. Not thread-safe: one
 * instance for each stream thread.
 */
final class Ranker implements AutoCloseable {
    static final int COUNTERS = 8;
    private static final String[] SOURCES = {"direct", "topic", "state", "aggregate", "similar", "none"};
    private static final int NONE = 5;

    private final Config config;
    private final JsonFactory json;
    private final Catalogue catalogue;
    private final Model model;
    private final Lookup lookup;
    private final Impression impression;
    private final int dim, dots, slotWidth, features, itemDim;
    private final ByteArrayBuilder bytes = new ByteArrayBuilder(8192);

    private Catalogue.Item[] ads = new Catalogue.Item[0];
    private Catalogue.Item[] past = new Catalogue.Item[0];
    private long[] pastTs = new long[0];
    private long[] buckets = new long[0];
    private float[] codes = new float[0];
    private float[] counters = new float[0];
    private float[] itemFeatures = new float[0];
    private float[] slots = new float[0];
    private int[] source = new int[0];
    private long[] age = new long[0];
    private float[] score = new float[0];
    private long[] order = new long[0];

    Ranker(Config config, JsonFactory json, Catalogue catalogue) throws OrtException {
        this.config = config;
        this.json = json;
        this.catalogue = catalogue;
        model = new Model(config);
        lookup = new Lookup(config);
        impression = new Impression(config, json);
        dim = config.dim();
        dots = config.dots();
        features = config.itemFeatures().size();
        itemDim = config.itemDim();
        slotWidth = 3 * dim + dots + 2 + 3 + 2 + 3;
    }

    /** The JSON of the ranked ads. Throws IOException for a value that is no impression. */
    byte[] rank(byte[] value, byte[] chunks) throws IOException, OrtException {
        long receivedMs = System.currentTimeMillis();
        Impression e = impression;
        e.read(value);
        int n = e.ads.size();
        lookup.read(chunks, e.ts);
        resize(n, Math.min(e.history.size(), config.historyLength()));
        for (int i = 0; i < n; i++) {
            ads[i] = catalogue.get(e.ads.get(i));
        }
        history(e);
        if (n > 0) {
            columns(e, n);
            boolean slotted = slots(e.ts, n);
            Model.Rows rows = feed(e, n);
            rows.score(slotted);
            scores(e, rows, slotted, n);
        }
        return answer(e, n, receivedMs);
    }

    Catalogue catalogue() {
        return catalogue;
    }

    @Override
    public void close() throws OrtException {
        model.close();
    }

    private void resize(int n, int h) {
        if (ads.length != n) {
            ads = new Catalogue.Item[n];
            buckets = new long[n];
            codes = new float[n * Catalogue.CODE];
            counters = new float[n * COUNTERS];
            itemFeatures = new float[n * features];
            slots = new float[n * slotWidth];
            source = new int[n];
            age = new long[n];
            score = new float[n];
            order = new long[n];
        }
        if (past.length != h) {
            past = new Catalogue.Item[h];
            pastTs = new long[h];
        }
    }

    private void history(Impression e) {
        int skip = e.history.size() - past.length;
        for (int k = 0; k < past.length; k++) {
            past[k] = catalogue.get(e.history.get(skip + k));
            pastTs[k] = e.historyTsCount > 0 ? Math.max(e.historyTs[skip + k], -1) : -1;
        }
    }

    /** What vm is fed with; the counters are those of models/kernels.py. */
    private void columns(Impression e, int n) {
        int h = past.length;
        float length = log1p(h);
        float userAge = h > 0 ? minutes(e.ts, pastTs[h - 1]) : 0;
        Arrays.fill(counters, 0);
        for (int i = 0; i < n; i++) {
            Catalogue.Item ad = ads[i];
            buckets[i] = ad.bucket;
            System.arraycopy(ad.code, 0, codes, i * Catalogue.CODE, Catalogue.CODE);
            System.arraycopy(ad.features, 0, itemFeatures, i * features, features);
            int items = 0, topics = 0, itemLast = 0, topicLast = 0;
            for (int k = 0; k < h; k++) {
                if (past[k].hash == ad.hash) {
                    items++;
                    itemLast = k;
                }
                if (ad.topic != 0 && past[k].topic == ad.topic) {
                    topics++;
                    topicLast = k;
                }
            }
            int at = i * COUNTERS;
            if (items > 0) {
                counters[at] = log1p(items);
                counters[at + 1] = 1f / (h - itemLast);
                counters[at + 2] = minutes(e.ts, pastTs[itemLast]);
            }
            if (topics > 0) {
                counters[at + 3] = log1p(topics);
                counters[at + 4] = 1f / (h - topicLast);
                counters[at + 5] = minutes(e.ts, pastTs[topicLast]);
            }
            counters[at + 6] = length;
            counters[at + 7] = userAge;
        }
    }

    /** Fills slots, sources and ages; whether anything is known of any pair. */
    private boolean slots(long now, int n) throws OrtException {
        boolean any = false;
        float aggregateAge = lookup.aggregateTs >= 0 ? seconds(now - lookup.aggregateTs) : 0;
        float aggregateCount = lookup.aggregateTs >= 0 ? log1p(lookup.aggregateCount) : 0;
        float stateAge = lookup.stateTs >= 0 ? seconds(now - lookup.stateTs) : 0;
        Arrays.fill(slots, 0);
        for (int i = 0; i < n; i++) {
            Catalogue.Item ad = ads[i];
            int at = i * slotWidth;
            int best = NONE;
            long bestAge = -1;
            long ts = lookup.direct(ad.hash, now, slots, at);
            at += dim;
            if (ts >= 0) {
                slots[at] = 1;
                slots[at + 1] = seconds(now - ts);
                best = 0;
                bestAge = now - ts;
            }
            at += 2;
            int topic = lookup.topic((int) ad.topic);
            if (topic >= 0) {
                lookup.topicMean(topic, slots, at);
                slots[at + dim] = 1;
                slots[at + dim + 1] = seconds(now - lookup.topicTs(topic));
                slots[at + dim + 2] = log1p(lookup.topicCount(topic));
                if (best == NONE) {
                    best = 1;
                    bestAge = now - lookup.topicTs(topic);
                }
            }
            at += dim + 3;
            if (lookup.stateTs >= 0) {
                dots(ad, at);
                slots[at + dots] = 1;
                slots[at + dots + 1] = stateAge;
                if (best == NONE) {
                    best = 2;
                    bestAge = now - lookup.stateTs;
                }
            }
            at += dots + 2;
            if (lookup.aggregateTs >= 0) {
                System.arraycopy(lookup.aggregate, 0, slots, at, dim);
                slots[at + dim] = 1;
                slots[at + dim + 1] = aggregateAge;
                slots[at + dim + 2] = aggregateCount;
                if (best == NONE) {
                    best = 3;
                    bestAge = now - lookup.aggregateTs;
                }
            }
            source[i] = best;
            age[i] = bestAge;
            any |= best != NONE;
        }
        return any;
    }

    private void dots(Catalogue.Item ad, int at) throws OrtException {
        float[] vector = ad.vector;
        if (vector == null) {
            vector = model.itemVector(ad);
            ad.vector = vector;
        }
        int headDim = config.headDim(), towerDim = config.towerDim(), heads = config.heads();
        for (int k = 0; k < heads; k++) {
            float total = dot(lookup.state, k * headDim, vector, 0, headDim);
            slots[at + k] = total >= 0 ? (float) Math.log1p(total) : (float) -Math.log1p(-total);
        }
        for (int k = 0; k < config.towers(); k++) {
            slots[at + heads + k] =
                    dot(lookup.state, heads * headDim + k * towerDim, vector, headDim + k * towerDim, towerDim);
        }
    }

    /** Four sums side by side: the compiler may not reorder floating-point additions by itself. */
    private static float dot(float[] a, int i, float[] b, int j, int n) {
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        int k = 0;
        for (; k + 3 < n; k += 4) {
            s0 += a[i + k] * b[j + k];
            s1 += a[i + k + 1] * b[j + k + 1];
            s2 += a[i + k + 2] * b[j + k + 2];
            s3 += a[i + k + 3] * b[j + k + 3];
        }
        for (; k < n; k++) {
            s0 += a[i + k] * b[j + k];
        }
        return s0 + s1 + (s2 + s3);
    }

    private Model.Rows feed(Impression e, int n) throws OrtException {
        Model.Rows rows = model.rows(n, slotWidth);
        rows.userBucket.put(0, Ids.bucket(Ids.hash(e.user), config.userBuckets()));
        rows.request.put(0, e.request);
        rows.itemBucket.put(0, buckets);
        rows.itemCode.put(0, codes);
        rows.counters.put(0, counters);
        rows.itemFeatures.put(0, itemFeatures);
        rows.slots.put(0, slots);
        return rows;
    }

    /** Scores, and the order by pCTR x bid, ties in the order received. */
    private void scores(Impression e, Model.Rows rows, boolean slotted, int n) {
        for (int i = 0; i < n; i++) {
            float logit = rows.base.get(i);
            if (slotted && source[i] != NONE) {
                float plus = rows.plus.get(i);
                logit = Float.isFinite(plus) ? plus : logit;
            }
            score[i] = (float) (1 / (1 + Math.exp(-logit)));
            float worth = score[i] * (e.bidCount > 0 ? e.bids[i] : 1);
            int bits = Float.floatToIntBits(Float.isFinite(worth) ? -worth : Float.POSITIVE_INFINITY);
            long key = bits >= 0 ? bits : ~bits ^ 0x80000000; // as signed integers in the order of the floats
            order[i] = key << 32 | i;
        }
        Arrays.sort(order);
    }

    private byte[] answer(Impression e, int n, long receivedMs) throws IOException {
        bytes.reset();
        try (JsonGenerator g = json.createGenerator(bytes)) {
            g.writeStartObject();
            g.writeStringField("type", "ranked_ads");
            g.writeStringField("id", e.id);
            g.writeStringField("user", e.user);
            g.writeNumberField("ts", e.ts);
            g.writeArrayFieldStart("ads");
            for (int k = 0; k < n; k++) {
                g.writeString(e.ads.get((int) order[k]));
            }
            g.writeEndArray();
            g.writeArrayFieldStart("positions");
            for (int k = 0; k < n; k++) {
                g.writeNumber((int) order[k]);
            }
            g.writeEndArray();
            g.writeArrayFieldStart("scores");
            for (int k = 0; k < n; k++) {
                g.writeNumber(Math.rint(score[(int) order[k]] * 1e7) / 1e7);
            }
            g.writeEndArray();
            g.writeArrayFieldStart("sources");
            for (int k = 0; k < n; k++) {
                g.writeString(SOURCES[source[(int) order[k]]]);
            }
            g.writeEndArray();
            g.writeArrayFieldStart("ages_ms");
            for (int k = 0; k < n; k++) {
                int i = (int) order[k];
                if (source[i] == NONE) {
                    g.writeNull();
                } else {
                    g.writeNumber(age[i]);
                }
            }
            g.writeEndArray();
            g.writeStringField("vm", config.vm());
            g.writeStringField("fm", config.fm());
            g.writeStringField("state", "live");
            g.writeNumberField("received_ms", receivedMs);
            g.writeNumberField("ranked_ms", System.currentTimeMillis());
            g.writeNullField("slots");
            g.writeEndObject();
        }
        return bytes.toByteArray();
    }

    private static float log1p(float x) {
        return (float) Math.log1p(x);
    }

    private static float seconds(long ms) {
        return log1p(Math.max(ms, 0) / 1000f);
    }

    private static float minutes(long now, long then) {
        return then < 0 ? 0 : log1p(Math.max(now - then, 0) / 60_000f);
    }
}
