package solaris.peers;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.File;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/** What the benchmark says about the run: topics, the bundle and its lengths. One JSON file. */
record Config(
        String bootstrap, String applicationId, String stateDir, String guarantee,
        String impressions, String embeddings, String items, String rankedAds,
        String bundle, String vm, String fm, long fmHash, long ttlMs, long windowMs,
        int userBuckets, int itemBuckets, int historyLength,
        List<String> requestFeatures, List<String> itemFeatures, String topicFeature,
        int dim, int profile, int heads, int headDim, int towers, int towerDim) {

    int stateDim() {
        return heads * headDim + towers * towerDim;
    }

    int itemDim() {
        return headDim + towers * towerDim;
    }

    int dots() {
        return heads + towers;
    }

    static Config read(String path) throws IOException {
        JsonNode c = new ObjectMapper().readTree(new File(path));
        return new Config(
                text(c, "bootstrap"), text(c, "application_id"), text(c, "state_dir"), text(c, "guarantee"),
                text(c, "impressions"), text(c, "embeddings"), text(c, "items"), text(c, "ranked_ads"),
                text(c, "bundle"), text(c, "vm"), text(c, "fm"),
                Long.parseUnsignedLong(text(c, "fm_hash")), number(c, "ttl_ms"), number(c, "window_ms"),
                (int) number(c, "user_buckets"), (int) number(c, "item_buckets"), (int) number(c, "history_length"),
                texts(c, "request_features"), texts(c, "item_features"), text(c, "topic_feature"),
                (int) number(c, "dim"), (int) number(c, "profile"),
                (int) number(c, "heads"), (int) number(c, "head_dim"),
                (int) number(c, "towers"), (int) number(c, "tower_dim"));
    }

    private static JsonNode required(JsonNode c, String name) {
        JsonNode value = c.get(name);
        if (value == null) {
            throw new IllegalArgumentException("the configuration has no " + name);
        }
        return value;
    }

    private static String text(JsonNode c, String name) {
        return required(c, name).asText();
    }

    private static long number(JsonNode c, String name) {
        return required(c, name).asLong();
    }

    private static List<String> texts(JsonNode c, String name) {
        List<String> out = new ArrayList<>();
        required(c, name).forEach(v -> out.add(v.asText()));
        return out;
    }
}
