package solaris.peers;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/** One impression, read by a streaming parser into buffers that are used again for the next one. */
final class Impression {
    private final JsonFactory json;
    private final List<String> requestNames;

    String id;
    String user;
    long ts;
    final List<String> ads = new ArrayList<>();
    float[] bids = new float[64];
    int bidCount;
    final float[] request;
    final List<String> history = new ArrayList<>();
    long[] historyTs = new long[64];
    int historyTsCount;

    Impression(Config config, JsonFactory json) {
        this.json = json;
        requestNames = config.requestFeatures();
        request = new float[requestNames.size()];
    }

    /** Throws IOException for what is no impression: not JSON, wrong types, columns that do not line up. */
    void read(byte[] value) throws IOException {
        id = null;
        user = null;
        ts = -1;
        ads.clear();
        history.clear();
        bidCount = 0;
        historyTsCount = 0;
        Arrays.fill(request, 0);
        try (JsonParser p = json.createParser(value)) {
            if (p.nextToken() != JsonToken.START_OBJECT) {
                throw new IOException("not an object");
            }
            while (p.nextToken() == JsonToken.FIELD_NAME) {
                String field = p.currentName();
                p.nextToken();
                switch (field) {
                    case "id" -> id = p.getText();
                    case "user" -> user = p.getText();
                    case "ts" -> ts = p.getLongValue();
                    case "ads" -> texts(p, ads);
                    case "bids" -> readBids(p);
                    case "features" -> readFeatures(p);
                    default -> p.skipChildren();
                }
            }
        }
        if (id == null || id.isEmpty() || user == null || user.isEmpty() || ts < 0
                || (bidCount > 0 && bidCount != ads.size())
                || (historyTsCount > 0 && historyTsCount != history.size())) {
            throw new IOException("not an impression");
        }
    }

    private void readFeatures(JsonParser p) throws IOException {
        while (p.nextToken() == JsonToken.FIELD_NAME) {
            String name = p.currentName();
            JsonToken token = p.nextToken();
            if (name.equals("history")) {
                texts(p, history);
            } else if (name.equals("history_ts")) {
                readHistoryTs(p);
            } else {
                int at = requestNames.indexOf(name);
                if (at >= 0 && token.isNumeric()) {
                    request[at] = p.getFloatValue();
                } else {
                    p.skipChildren();
                }
            }
        }
    }

    private void readBids(JsonParser p) throws IOException {
        if (p.currentToken() != JsonToken.START_ARRAY) {
            return;
        }
        while (p.nextToken() != JsonToken.END_ARRAY) {
            if (bidCount == bids.length) {
                bids = Arrays.copyOf(bids, 2 * bidCount);
            }
            bids[bidCount++] = p.getFloatValue();
        }
    }

    private void readHistoryTs(JsonParser p) throws IOException {
        if (p.currentToken() != JsonToken.START_ARRAY) {
            return;
        }
        while (p.nextToken() != JsonToken.END_ARRAY) {
            if (historyTsCount == historyTs.length) {
                historyTs = Arrays.copyOf(historyTs, 2 * historyTsCount);
            }
            historyTs[historyTsCount++] = p.currentToken() == JsonToken.VALUE_NULL ? -1 : p.getLongValue();
        }
    }

    private static void texts(JsonParser p, List<String> out) throws IOException {
        if (p.currentToken() != JsonToken.START_ARRAY) {
            return;
        }
        while (p.nextToken() != JsonToken.END_ARRAY) {
            out.add(p.getText());
        }
    }
}
