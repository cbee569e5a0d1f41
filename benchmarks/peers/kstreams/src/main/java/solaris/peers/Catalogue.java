package solaris.peers;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

/** What is known of items, decoded once per item record: the global thread writes, stream threads read. */
final class Catalogue {
    static final int CODE = 64;
    private static final int CATEGORIES = 1 << 20;
    private static final int CAPACITY = 1 << 20;

    /** An item as the models are fed with it; {@code vector} is made when it is first ranked. */
    static final class Item {
        final long hash;
        final long bucket;
        final float[] features;
        final float topic;
        final float[] code = new float[CODE];
        volatile float[] vector;

        Item(long hash, int buckets, float[] features, int topicColumn) {
            this.hash = hash;
            this.bucket = Ids.bucket(hash, buckets);
            this.features = features;
            this.topic = features[topicColumn];
            for (int j = 0; j < CODE; j++) {
                code[j] = (hash >>> j & 1) == 1 ? 0.125f : -0.125f;
            }
        }
    }

    private final JsonFactory json;
    private final List<String> names;
    private final int topicColumn;
    private final int buckets;
    private final Map<String, Item> items = new ConcurrentHashMap<>(1 << 16);

    Catalogue(Config config, JsonFactory json) {
        this.json = json;
        names = config.itemFeatures();
        topicColumn = names.indexOf(config.topicFeature());
        buckets = config.itemBuckets();
    }

    /** Never null: an item that the catalogue does not know has zeros for features. */
    Item get(String id) {
        Item item = items.get(id);
        if (item == null) {
            item = new Item(Ids.hash(id), buckets, new float[names.size()], topicColumn);
            if (items.size() < CAPACITY) {
                items.put(id, item);
            }
        }
        return item;
    }

    void update(byte[] value) {
        float[] features = new float[names.size()];
        String id = null;
        try (JsonParser p = json.createParser(value)) {
            p.nextToken();
            while (p.nextToken() == JsonToken.FIELD_NAME) {
                String field = p.currentName();
                p.nextToken();
                if (field.equals("id")) {
                    id = p.getText();
                } else if (field.equals("features")) {
                    while (p.nextToken() == JsonToken.FIELD_NAME) {
                        int at = names.indexOf(p.currentName());
                        JsonToken token = p.nextToken();
                        if (at >= 0 && token != JsonToken.VALUE_NULL) {
                            features[at] = at == topicColumn ? category(p.getText()) : p.getFloatValue();
                        } else {
                            p.skipChildren();
                        }
                    }
                } else {
                    p.skipChildren();
                }
            }
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        if (id != null) {
            items.put(id, new Item(Ids.hash(id), buckets, features, topicColumn));
        }
    }

    private static float category(String value) {
        return 1 + Long.remainderUnsigned(Ids.hash(value), CATEGORIES);
    }
}
