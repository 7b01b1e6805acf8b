// A table of texts, states, progress bars and buttons. Vue patches only changes, so a button keeps its focus.
// Invariant: values are shown as text, never as HTML.
export default {
  template: `
    <div class="ops-table">
      <p v-if="!rows.length" class="muted ops-table__empty">{{ empty }}</p>
      <table v-else :aria-label="label">
        <thead>
          <tr>
            <th v-for="column in columns" :key="column.name" scope="col" :class="'ops-cell--' + column.kind">
              {{ column.label }}
            </th>
          </tr>
        </thead>
        <tbody>
          <tr v-for="row in rows" :key="row.id">
            <td v-for="column in columns" :key="column.name" :data-label="column.label"
              :class="['ops-cell--' + column.kind, { 'ops-cell--empty': isEmpty(row[column.name]) }]">
              <span v-if="column.kind === 'state'" class="ops-state" :class="'ops-state--' + row[column.name].tone">
                <span aria-hidden="true" class="ops-state__sign">{{ row[column.name].sign }}</span>
                <span class="ops-state__text">{{ row[column.name].text }}</span>
              </span>
              <div v-else-if="column.kind === 'progress'" class="ops-progress">
                <span>{{ row[column.name].text }}</span>
                <progress v-if="row[column.name].share !== null" max="1" :value="row[column.name].share"
                  :aria-label="row[column.name].text || column.label"></progress>
                <progress v-else-if="row[column.name].busy" :aria-label="row[column.name].text || column.label"></progress>
              </div>
              <div v-else-if="column.kind === 'actions'" class="ops-actions">
                <button v-for="action in row[column.name]" :key="action.name" type="button" class="ops-button"
                  :disabled="action.disabled" :aria-label="action.label + ' ' + action.subject"
                  @click="$emit('action', row.id, action.name)">{{ action.label }}</button>
              </div>
              <template v-else>{{ row[column.name] }}</template>
            </td>
          </tr>
        </tbody>
      </table>
    </div>
  `,
  props: { label: String, columns: Array, rows: Array, empty: String },
  emits: ["action"],
  methods: {
    isEmpty(value) {
      return value === "" || (value.text === "" && value.share === null && !value.busy);
    },
  },
};
