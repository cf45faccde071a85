// Compares wire.go with docs/wire-vectors.json.

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"sort"
	"strings"
)

type vectorFile struct {
	Routes     []json.RawMessage `json:"routes"`
	Refused    []message         `json:"refused"`
	Hashed     []message         `json:"hashed"`
	Received   []receivedVector  `json:"received"`
	Partitions map[string]int    `json:"partitions"`
	Records    []recordVector    `json:"records"`
	Questions  []questionVector  `json:"questions"`
}

type questionVector struct {
	Key     string `json:"key"`
	Publish table  `json:"publish"`
	Answer  string `json:"answer"`
	Found   table  `json:"found"`
}

type receivedVector struct {
	Headers table       `json:"headers"`
	Due     interface{} `json:"due"`
	Key     interface{} `json:"key"`
	Copy    table       `json:"copy"`
}

type recordVector struct {
	Now       int64 `json:"now"`
	Operation struct {
		operation
		Message *struct {
			Properties json.RawMessage `json:"properties"`
			Body       json.RawMessage `json:"body"`
		} `json:"message"`
	} `json:"operation"`
	Append struct {
		Exchange    string          `json:"exchange"`
		RoutingKeys []string        `json:"routing_keys"`
		Head        interface{}     `json:"head"`
		Tail        json.RawMessage `json:"tail"`
		Spaces      int             `json:"spaces"`
	} `json:"append"`
}

// checkVectors returns the number of vectors, or the first difference.
func checkVectors(file string) (int, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	var all vectorFile
	if err := json.Unmarshal(text, &all); err != nil {
		return 0, err
	}
	for _, one := range all.Routes {
		if err := checkRoute(one); err != nil {
			return 0, err
		}
	}
	for _, one := range append(all.Refused, all.Hashed...) {
		if _, err := delayed(one); err == nil {
			return 0, fmt.Errorf("%v was not refused", one)
		}
	}
	for _, one := range all.Received {
		copied := table{"headers": copyOf(one.Headers)}
		for _, name := range []string{"priority", "expiration"} {
			if value, isThere := one.Headers["bide-"+name]; isThere {
				copied[name] = value
			}
		}
		due, key := waitOf(one.Headers)
		if err := equal(one, []interface{}{one.Copy, one.Due, one.Key}, []interface{}{copied, due, key}); err != nil {
			return 0, err
		}
	}
	for key, expected := range all.Partitions {
		if err := equal(key, expected, partitionOf(key)); err != nil {
			return 0, err
		}
	}
	for _, one := range all.Records {
		if err := checkRecord(one); err != nil {
			return 0, err
		}
	}
	for _, one := range all.Questions {
		key, body, err := questionOf(one.Key)
		if err != nil {
			return 0, err
		}
		found, err := stateOf([]byte(one.Answer))
		if err != nil {
			return 0, err
		}
		asked := table{"exchange": base + ".schedule", "routing_key": key, "body": json.RawMessage(body)}
		if err := equal(one, []interface{}{one.Publish, one.Found}, []interface{}{asked, found}); err != nil {
			return 0, err
		}
	}
	count := len(all.Routes) + len(all.Refused) + len(all.Hashed)
	return count + len(all.Received) + len(all.Partitions) + len(all.Records) + len(all.Questions), nil
}

func checkRoute(text []byte) error {
	var given message
	var expected table
	if err := json.Unmarshal(text, &given); err != nil {
		return err
	}
	if err := json.Unmarshal(text, &expected); err != nil {
		return err
	}
	made, err := delayed(given)
	if err != nil {
		return err
	}
	for _, name := range []string{"target", "delay", "now", "release", "properties"} {
		delete(expected, name)
	}
	return equal(string(text), expected, made)
}

func checkRecord(vector recordVector) error {
	given := vector.Operation.operation
	if message := vector.Operation.Message; message != nil {
		properties, err := wholeNumbers(message.Properties)
		if err != nil {
			return err
		}
		body, err := bodyOf(message.Body)
		if err != nil {
			return err
		}
		given.Message = &scheduledMessage{properties.(table), body}
	}
	keys, body, err := recordOf(given, vector.Now)
	if err != nil {
		return err
	}
	head, tail, _ := bytes.Cut(body, []byte("\n"))
	start := `{"v":` + strings.Repeat(" ", vector.Append.Spaces) + "1"
	sum := sha256.Sum256(tail)
	var end interface{} = hex.EncodeToString(tail)
	if vector.Append.Tail[0] == '{' {
		end = table{"sha256": hex.EncodeToString(sum[:])}
	}
	return equal(
		vector,
		[]interface{}{vector.Append.Exchange, vector.Append.RoutingKeys, vector.Append.Head, start, vector.Append.Tail},
		[]interface{}{base + ".schedule", keys, json.RawMessage(head), string(head[:len(start)]), end})
}

func bodyOf(text json.RawMessage) ([]byte, error) {
	var repeated struct {
		Repeat string `json:"repeat"`
		Times  int    `json:"times"`
	}
	if text[0] == '{' {
		err := json.Unmarshal(text, &repeated)
		return []byte(strings.Repeat(repeated.Repeat, repeated.Times)), err
	}
	var body string
	err := json.Unmarshal(text, &body)
	return []byte(body), err
}

// equal compares two values as JSON.
func equal(vector, expected, found interface{}) error {
	values := []interface{}{expected, found}
	for place, value := range values {
		text, err := json.Marshal(value)
		if err != nil {
			return err
		}
		var decoded interface{}
		if err := json.Unmarshal(text, &decoded); err != nil {
			return err
		}
		values[place] = decoded
	}
	if !reflect.DeepEqual(values[0], values[1]) {
		return fmt.Errorf("%v: %v expected, %v found", vector, values[0], values[1])
	}
	return nil
}

// wholeNumbers decodes JSON without floating-point numbers.
func wholeNumbers(text []byte) (interface{}, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var value interface{}
	if err := decoder.Decode(&value); err != nil {
		return nil, err
	}
	return withoutFloats(value)
}

func withoutFloats(value interface{}) (interface{}, error) {
	switch value := value.(type) {
	case json.Number:
		return value.Int64()
	case table:
		for name, one := range value {
			whole, err := withoutFloats(one)
			if err != nil {
				return nil, err
			}
			value[name] = whole
		}
	}
	return value, nil
}

func sortedNames(fields table) []string {
	var names []string
	for name := range fields {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}
