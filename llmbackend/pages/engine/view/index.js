/** What the component needs of the view. */

export { LiveView } from "./live_view.js";
export { TABLE_COLUMNS, blockTip, laneTip } from "./status.js";
export { WIDTHS_S } from "./time_window.js";
